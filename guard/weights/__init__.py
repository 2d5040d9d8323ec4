"""What stands beside a rule's weights, and the weights of a head. Knows nothing of models."""
