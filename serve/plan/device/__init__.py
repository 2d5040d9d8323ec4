"""How long a step takes, and what fits into memory, by device."""
