"""A rule's phrases to labelled conversations, without a model and without a network."""
