"""A file of somebody's own rows, for tests of what reads one. Tests only."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from guard.conversation.example import SPLITS


def random_rows(count: int = 48) -> list[dict[str, Any]]:
    """Rows of random words, half of them violating."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        text = " ".join("".join(rng.choices("abcdefghij", k=4)) for _ in range(12))
        # What a stranger's rows say of themselves, each what it likes.
        meta = ({}, {"domain": None}, {"severity": "mild", "cores": 3, "phrasings": ["free"]})
        rows.append({"text": text, "label": number % 2, "meta": meta[number % 3]})
    return rows


def in_splits(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, as many in every split, both labels in each."""
    return [row | {"split": SPLITS[number // 2 % 3]} for number, row in enumerate(rows)]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    """The path of a file of the rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
