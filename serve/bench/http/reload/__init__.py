"""Rules that are replaced while they are checked."""
