"""What the planner is calibrated by, and what it is held to."""
