"""Data of the reader: conversations under policies of many rules."""
