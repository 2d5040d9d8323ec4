"""One adapter with PEFT and TRL, and what every way of training an adapter needs."""
