"""Examples -> weights by every method of a recipe, calibrated, exported with their card."""

import os

# TRL reports every trainer that is built; this keeps it from sending anything.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
