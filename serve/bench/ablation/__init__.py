"""The ablation: one optimisation of the engine off at a time."""
