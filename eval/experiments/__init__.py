"""Questions about the trained rules that are asked once, each a command of its own."""
