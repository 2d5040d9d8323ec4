"""Many adapters, one a request: round-robin or by Zipf's law, against a PEFT baseline."""
