"""Rules on an encoder: a LoRA with a head of its own, or a head alone."""
