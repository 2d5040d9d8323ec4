"""What stands in front of the replicas: one address for all of them."""
