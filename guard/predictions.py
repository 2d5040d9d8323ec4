"""`predictions.jsonl` in every adapter folder: the raw logits of its validation and test rows. Knows nothing of models."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from guard.errors import GuardError

PREDICTIONS = "predictions.jsonl"


def write_predictions(folder: Path, rows: Iterable[tuple[str, str, float]]) -> None:
    """Write id, split and logit (log P(yes) - log P(no), nats, uncalibrated; of test rows through plain PEFT) of every row."""
    lines = (
        json.dumps({"id": row_id, "split": split, "logit": logit}) + "\n"
        for row_id, split, logit in rows
    )
    (folder / PREDICTIONS).write_text("".join(lines), encoding="utf-8")


def read_predictions(folder: Path, split: str, remedy: str) -> dict[str, float]:
    """The logits of one split by id, in nats. Raises GuardError with `remedy` where they are missing or torn."""
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
                logits[str(row["id"])] = float(row["logit"])
                if not math.isfinite(logits[str(row["id"])]):
                    raise ValueError(f"the logit is {row['logit']}")
        except (ValueError, KeyError, TypeError) as error:
            raise GuardError(
                f"not a prediction: {error!r}", where=f"{path}:{number}", remedy=remedy
            ) from error
    return logits
