"""The benchmarks of training: cost and accuracy of cached prefixes against TRL and PEFT."""
