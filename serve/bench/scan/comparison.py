"""The output of a scan that was killed against that of a scan that was left alone.

Knows nothing of processes.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class RowKey(NamedTuple):
    """The conversation and the rule of a row."""

    source: str
    row: int
    rule: str


@dataclass(frozen=True)
class ScanOutput:
    """What a scan has written: the content of its parts by name, and its rows by key.

    `repeated_rows`: rows whose key an earlier row has. A line that is not JSON is no row.
    """

    parts: dict[str, bytes]
    rows: dict[RowKey, dict[str, Any]]
    repeated_rows: int

    @property
    def conversations(self) -> int:
        """The number of conversations that have a row."""
        return len({(key.source, key.row) for key in self.rows})


@dataclass(frozen=True)
class OutputDifference:
    """How a killed scan's output differs from that of one left alone.

    `missing_rows` are only in the output of the scan left alone, `extra_rows` only in that of the
    killed one. `different_rows` are in both, with other verdicts or probabilities.
    `largest_change`: in a probability of these.
    """

    identical_files: int
    missing_rows: int
    extra_rows: int
    repeated_rows: int
    different_rows: int
    largest_change: float


def parts_of(folder: Path) -> list[str]:
    """The names of the parts that a scan has written to the folder, in order."""
    return sorted(path.name for path in folder.glob("part-*.jsonl"))


def output_of(folder: Path) -> ScanOutput:
    """Read everything that a scan has written to the folder."""
    parts = {name: (folder / name).read_bytes() for name in parts_of(folder)}
    rows: dict[RowKey, dict[str, Any]] = {}
    repeated_rows = 0
    for content in parts.values():
        for line in content.splitlines():
            with contextlib.suppress(ValueError):  # a line cut off: its row counts as missing
                row = json.loads(line)
                key = RowKey(row["source"], row["row"], row["rule"])
                repeated_rows += key in rows
                rows[key] = row
    return ScanOutput(parts, rows, repeated_rows)


def difference(whole: ScanOutput, killed: ScanOutput) -> OutputDifference:
    """Compare the outputs of a scan left alone and of a killed one, row by row."""
    identical_files = 0
    for name, content in whole.parts.items():
        identical_files += killed.parts.get(name) == content
    different_rows, largest_change = 0, 0.0
    for key in whole.rows.keys() & killed.rows.keys():
        row, killed_row = whole.rows[key], killed.rows[key]
        different_rows += row != killed_row
        largest_change = max(largest_change, _change(row["p_violation"], killed_row["p_violation"]))
    return OutputDifference(
        identical_files=identical_files,
        missing_rows=len(whole.rows.keys() - killed.rows.keys()),
        extra_rows=len(killed.rows.keys() - whole.rows.keys()),
        repeated_rows=killed.repeated_rows,
        different_rows=different_rows,
        largest_change=largest_change,
    )


def _change(p: float | None, killed_p: float | None) -> float:
    """The difference of two probabilities; 1 where only one row has one."""
    if p is None or killed_p is None:
        return float(p is not killed_p)
    return abs(p - killed_p)
