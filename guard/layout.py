"""The layout of the output folder `runs/`, and whether a stage's output is still current."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.conversation.example import SPLITS, Example, Split, read_examples
from guard.errors import GuardError
from guard.home import HOME

STAMP = "stage.json"  # says what a finished stage's folder was made from


@dataclass(frozen=True)
class Runs:
    """The output folder: data by rule; weights by model, rule, method and seed; reports."""

    root: Path = HOME / "runs"
    label: str = ""  # its name in messages, where there are several

    def data(self, rule: str) -> Path:
        return self.root / "data" / rule

    def adapter(self, model: str, rule: str, method: str, seed: int = 0) -> Path:
        """The folder of a rule's weights; seed 0 is the one that is served."""
        if seed:
            method = f"{method}-seed{seed}"
        return self.root / model / rule / method

    def reviews(self, rule: str) -> Path:
        """The labels that reviewers settled, as rows."""
        return self.root / "reviews" / f"{rule}.jsonl"

    @property
    def reader(self) -> Path:
        """What the reader is made from, and of: its data, its training."""
        return self.root / "reader"

    @property
    def report(self) -> Path:
        return self.root / "report.json"


def fingerprint(*inputs: Any) -> str:
    """SHA-256 over files (their bytes) and JSON-able values: equal if the inputs are the same."""
    digest = hashlib.sha256()
    for value in inputs:
        if isinstance(value, Path):
            content = value.read_bytes()
        else:
            content = json.dumps(value, sort_keys=True, default=str).encode()
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def split_files(folder: Path) -> tuple[Path, ...]:
    files = tuple(folder / f"{split}.jsonl" for split in SPLITS)
    for file in files:
        if not file.is_file():
            raise GuardError("no such file", where=file, remedy="Run `make data` for this rule")
    return files


def read_splits(folder: Path) -> dict[Split, list[Example]]:
    files = zip(SPLITS, split_files(folder), strict=True)
    return {split: read_examples(file) for split, file in files}


@functools.cache
def running_code(files: tuple[Path, ...]) -> str:
    """A fingerprint of this process's code, which an edit of its files does not change."""
    return fingerprint(*files)


def is_current(folder: Path, inputs: str) -> bool:
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text() == _stamp(inputs)


def mark_current(folder: Path, inputs: str) -> None:
    (folder / STAMP).write_text(_stamp(inputs))


def not_current(folder: Path) -> None:
    (folder / STAMP).unlink(missing_ok=True)


def _stamp(inputs: str) -> str:
    return json.dumps({"inputs": inputs}) + "\n"
