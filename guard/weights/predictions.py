"""`predictions.jsonl` beside every rule's weights: raw logits of its validation and test rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from guard.errors import GuardError

PREDICTIONS = "predictions.jsonl"
DAY_ZERO = "day zero "  # before a split: what the base's reader answers


def write_predictions(folder: Path, rows: Iterable[tuple[str, str, float]]) -> None:
    """Write rows of an id, a split and a logit; test rows' logits are the method's reference's."""
    with (folder / PREDICTIONS).open("w", encoding="utf-8") as file:
        for row_id, split, logit in rows:
            file.write(json.dumps({"id": row_id, "split": split, "logit": logit}) + "\n")


def read_predictions(folder: Path, split: str, remedy: str) -> dict[str, float]:
    path = folder / PREDICTIONS
    if not path.is_file():
        raise GuardError("no such file", where=path, remedy=remedy)
    logits = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
            if row["split"] == split:
                logits[str(row["id"])] = logit = float(row["logit"])
                if not math.isfinite(logit):
                    raise ValueError(f"the logit is {logit}")
        except (ValueError, KeyError, TypeError) as error:
            where = f"{path}:{number}"
            raise GuardError(f"not a prediction: {error!r}", where=where, remedy=remedy) from error
    return logits
