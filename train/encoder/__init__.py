"""Rules on an encoder: a LoRA with a head of its own or GLiNER2's classifier, or a head alone."""
