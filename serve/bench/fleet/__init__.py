"""Many adapters, round-robin or by Zipf's law, against a PEFT baseline."""
