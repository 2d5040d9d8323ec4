"""The input of a scan: conversations of mixed lengths in files of every kind, and random aLoRAs.

Knows nothing of engines or clocks.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guard.layout import Runs
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe
from serve.bench.workload.prompts import ROLES, WORDS, WORDS_PER_TURN
from serve.bench.workload.random_adapter import save_random_adapters

SHORTEST, LONGEST = 40, 800  # words of a conversation, about as many tokens; log-uniform
SYSTEM_PROMPTS, SYSTEM_WORDS = 8, 60
WITH_SYSTEM_PROMPT = 1 / 3  # share of the conversations
UNREADABLE_EVERY = 500  # one row in so many holds no conversation
METHOD = "alora"


def stored_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows as `make scan` reads them."""
    draw = random.Random(seed)
    systems = [" ".join(draw.choices(WORDS, k=SYSTEM_WORDS)) for _ in range(SYSTEM_PROMPTS)]
    rows: list[dict[str, Any]] = []
    for number in range(count):
        row: dict[str, Any] = {"id": f"c{number}"}
        if number % UNREADABLE_EVERY != UNREADABLE_EVERY - 1:
            length = round(SHORTEST * (LONGEST / SHORTEST) ** draw.random())
            row["messages"] = _messages(draw.choices(WORDS, k=length))
            if draw.random() < WITH_SYSTEM_PROMPT:
                system = {"role": "system", "content": draw.choice(systems)}
                row["messages"].insert(0, system)
        rows.append(row)
    return rows


def save_rows(folder: Path, rows: Sequence[dict[str, Any]]) -> list[Path]:
    """Write a quarter of the rows each as JSON lines, compressed, as Parquet, and as JSON lines."""
    import pyarrow
    import pyarrow.parquet

    quarter = -(-len(rows) // 4)
    quarters = [rows[start : start + quarter] for start in range(0, len(rows), quarter)]
    names = ("1.jsonl", "2.jsonl.gz", "3.parquet", "4.jsonl")
    files = [folder / name for name in names[: len(quarters)]]
    for file, part in zip(files, quarters, strict=True):
        if file.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(part)), file)
            continue
        lines = "".join(json.dumps(row) + "\n" for row in part).encode()
        file.write_bytes(gzip.compress(lines) if file.suffix == ".gz" else lines)
    return files


def save_rules(runs: Runs, recipe: Recipe, rules: int) -> None:
    """Write random aLoRAs where `make scan` finds a base's rules."""
    folders = [runs.adapter(recipe.name, f"random_{number:02d}", METHOD) for number in range(rules)]
    save_random_adapters(folders, recipe, METHOD, prompt_builder(recipe))


def _messages(words: Sequence[str]) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for start in range(0, len(words), WORDS_PER_TURN):
        content = " ".join(words[start : start + WORDS_PER_TURN])
        messages.append({"role": ROLES[len(messages) % 2], "content": content})
    return messages
