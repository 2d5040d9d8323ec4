"""The machine that a stage runs on: its device, its memory, its versions, and who else is busy."""
