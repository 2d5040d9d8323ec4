"""The benchmarks of serving: `make serve` and `make bench`. Nobody imports them."""
