"""Rules to labelled examples, from any of `SOURCES` in `data/build.py`. Knows nothing of models."""
