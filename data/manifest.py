"""What a data set is made of, in numbers: `manifest.json`.

Knows nothing of how the examples were made.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guard.conversation.example import SPLITS, Example
from guard.files.atomic import atomic_write

FEW_TEST_ROWS = 100


def describe(examples: Sequence[Example]) -> dict[str, Any]:
    words: dict[str, dict[str, float]] = {}
    for label in (0, 1):
        texts = [_text(example) for example in examples if example.label == label]
        words[str(label)] = {"median": statistics.median(len(text.split()) for text in texts)}
    labels: dict[tuple[int, str], list[int]] = defaultdict(list)
    for example in examples:
        stratum = str(example.meta.get("stratum"))
        labels[SPLITS.index(example.split), stratum].append(example.label)
    counts: list[dict[str, Any]] = []
    for (split, stratum), part in sorted(labels.items()):
        rows = {"rows": len(part), "violating": sum(part)}
        counts.append({"split": SPLITS[split], "stratum": stratum} | rows)
    return {"counts": counts, "words": words}


def _text(example: Example) -> str:
    return " ".join(message.content for message in example.messages)


def save(folder: Path, manifest: dict[str, Any]) -> None:
    with atomic_write(folder / "manifest.json") as part:
        part.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path) -> dict[str, Any]:
    """The manifest of the data set in `folder`; empty where there is none."""
    path = folder / "manifest.json"
    if not path.is_file():
        return {}
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def table(rule: str, manifest: dict[str, Any]) -> str:
    lines = [f"{rule}: {manifest['source']}, seed {manifest['seed']}"]
    lines.append(f"  {'split':<12}{'stratum':<9}{'rows':>6}{'violate':>9}")
    for row in manifest["counts"]:
        lines.append(
            f"  {row['split']:<12}{row['stratum']:<9}{row['rows']:>6}{row['violating']:>9}"
        )
    median = {label: words["median"] for label, words in manifest["words"].items()}
    lines.append(
        f"  words per conversation: {median['1']:.0f} median if violating, {median['0']:.0f} if not"
    )
    tested = sum(row["rows"] for row in manifest["counts"] if row["split"] == "test")
    if tested < FEW_TEST_ROWS:
        margin = 98 / math.sqrt(tested)  # 1.96 standard errors of a share of one half, in points
        lines.append(
            f"  few rows: on {tested} test rows an accuracy is uncertain by up to {margin:.0f} "
            "points either way (95 %)"
        )
    if reviews := manifest.get("reviews"):
        left_out = f"{reviews['repeated']} left out that repeat others"
        lines.append(f"  {reviews['rows']} of them are reviewed rows; {left_out}")
    if debate := manifest.get("debate"):
        cost = "" if debate["cost_usd"] is None else f", {debate['cost_usd']:.2f} USD"
        lines.append(f"  {debate['calls']:,} answers, {debate['malformed']} not in form{cost}")
        lines += [f"  {count:>6} {outcome}" for outcome, count in debate["outcomes"].items()]
    return "\n".join(lines)
