"""The ablation: one optimisation of the engine is off at a time."""
