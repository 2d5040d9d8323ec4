"""The work of a GPU in a fan-out, counted without one."""
