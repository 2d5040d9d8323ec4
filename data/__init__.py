"""Rules to labelled examples, from any of `SOURCES` in `data/sources.py`."""
