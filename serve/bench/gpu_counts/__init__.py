"""What a fan-out makes a GPU do, counted without one."""
