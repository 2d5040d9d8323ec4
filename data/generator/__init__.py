"""The offline generator: a rule's phrases -> labelled conversations, without a model and without a network."""
