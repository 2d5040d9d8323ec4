"""Rules to labelled examples: offline generator, your own files, hub data sets. Knows nothing of models."""
