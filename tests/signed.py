"""A folder of weights whose files or card were changed, made a version of its own. Tests only."""

from __future__ import annotations

import json
from pathlib import Path

from guard.files.yaml_file import validate
from guard.weights.card import CARD, VERSION, Card, file_digests


def sign(folder: Path, **changes: object) -> Card:
    """Write the card anew for the files that are there now, with other values."""
    content = json.loads((folder / CARD).read_text(encoding="utf-8")) | changes
    content.pop(VERSION, None)
    card = validate(content, Card, where=folder)
    card = card.model_copy(update={"files": file_digests(folder, card.method)})
    card.save(folder)
    return card
