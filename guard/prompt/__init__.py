"""What a model reads of a conversation and a rule. Knows nothing of models, only of tokenizers."""
