"""Files that every stage writes and reads: whole or not at all, answer by answer, strict YAML."""
