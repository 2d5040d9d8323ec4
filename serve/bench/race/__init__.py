"""The race: one conversation against many rules, by LoRA and by aLoRA, live and as an animation."""
