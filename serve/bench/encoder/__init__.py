"""Rules on an encoder: the time of one conversation, and a decoder's beside it."""
