"""Two outputs of a scan, written by hand: one whole, one with losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serve.bench.scan.comparison import difference, output_of, parts_of


def row(number: int, p_violation: float | None) -> dict[str, Any]:
    return {"source": "chats.jsonl", "row": number, "rule": "a", "p_violation": p_violation}


def write(folder: Path, **parts: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for name, rows in parts.items():
        lines = "".join(json.dumps(written) + "\n" for written in rows)
        (folder / f"part-{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def test_equal_outputs_do_not_differ(tmp_path: Path) -> None:
    parts = {"1": [row(1, 0.25)], "2": [row(2, None), row(3, 0.5)]}
    whole, killed = write(tmp_path / "whole", **parts), write(tmp_path / "killed", **parts)
    assert parts_of(whole) == ["part-1.jsonl", "part-2.jsonl"]
    output = output_of(whole)
    assert (output.conversations, len(output.rows), output.repeated_rows) == (3, 3, 0)
    compared = difference(output, output_of(killed))
    assert compared.identical_files == 2 and compared.largest_change == 0
    assert (compared.missing_rows, compared.extra_rows, compared.repeated_rows) == (0, 0, 0)
    assert compared.different_rows == 0


def test_what_is_lost_extra_repeated_or_different_is_counted_apart(tmp_path: Path) -> None:
    first, second = [row(1, 0.25), row(2, 0.5)], [row(3, 0.75), row(4, 0.125)]
    whole = write(tmp_path / "whole", first=first, lost=second, same=[row(5, None)])
    killed = write(
        tmp_path / "killed",
        first=[row(1, 0.25), row(2, 0.625), row(1, 0.25)],
        same=[row(5, None)],
        unknown=[row(6, 0.5)],
    )
    compared = difference(output_of(whole), output_of(killed))
    assert compared.identical_files == 1
    assert (compared.missing_rows, compared.extra_rows, compared.repeated_rows) == (2, 1, 1)
    assert (compared.different_rows, compared.largest_change) == (1, 0.125)


def test_a_row_that_is_cut_off_is_missing(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", first=[row(1, 0.25), row(2, 0.5)])
    killed = write(tmp_path / "killed", first=[row(1, 0.25), row(2, 0.5)])
    path = killed / "part-first.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    compared = difference(output_of(whole), output_of(killed))
    assert (compared.missing_rows, compared.different_rows, compared.identical_files) == (1, 0, 0)


def test_only_one_probability_is_the_largest_change(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", first=[row(1, 0.25)])
    killed = write(tmp_path / "killed", first=[row(1, None)])
    compared = difference(output_of(whole), output_of(killed))
    assert (compared.different_rows, compared.largest_change) == (1, 1.0)


def test_a_scan_that_has_lost_everything_is_compared(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", first=[row(1, 0.25)])
    compared = difference(output_of(whole), output_of(write(tmp_path / "killed")))
    assert (compared.missing_rows, compared.different_rows, compared.largest_change) == (1, 0, 0)
