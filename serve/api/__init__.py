"""HTTP around the engine: what one server shares whichever wire format (`formats/`) is spoken.

Knows nothing of vLLM.
"""
