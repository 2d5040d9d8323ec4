"""Parts are so many conversations of all sources, in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.scan.manifest import ScanManifest
from serve.scan.scan import read_parts
from serve.scan.sources import size_of
from tests.serve.scan.test_scan import manifest, write_rows


def test_a_part_goes_on_in_the_next_source_and_bytes_add_up(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / name, 7) for name in ("a.jsonl", "b.jsonl")]
    parts = list(read_parts(manifest(*files, rows_a_part=4)))
    assert [part.number for part in parts] == [0, 1, 2, 3]
    assert [len(part.conversations) for part in parts] == [4, 4, 4, 2]
    sources = [(row.source, row.number) for part in parts for row in part.conversations]
    assert sources == [(str(file), number) for file in files for number in range(7)]
    assert sum(part.read_bytes for part in parts) == sum(size_of(str(file)) for file in files)
    assert all(part.read_bytes > 0 for part in parts)


def test_nothing_stored_is_no_part(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    assert list(read_parts(manifest(tmp_path / "a.jsonl"))) == []


def test_a_source_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "a.jsonl.gz"
    broken.write_bytes(b"not gzip")
    states = {str(broken): (8, 0)}
    with pytest.raises(GuardError, match="not readable"):
        list(read_parts(ScanManifest("toy", states, {"words": "abc"}, 4, "jsonl")))
