"""Examples -> weights by every method of a recipe, calibrated, exported with their card.

`python -m train.run`.
"""

import os

# TRL reports every trainer it builds; what is trained here is nobody else's business.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
