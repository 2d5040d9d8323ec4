"""A folder of parts: whole or not there, of one scan and no other, whatever changes a verdict."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from guard.errors import GuardError
from serve.scan.parts import PartFolder, ScanManifest, ScanRow, delete_scan

SOURCES = {"a.jsonl": (5, 7), "b.jsonl": (5, 7)}
MANIFEST = ScanManifest("tiny", SOURCES, {"fine": "abc"}, 10)
ROWS = [
    ScanRow("a.jsonl", 0, "x", "fine", "violation", 0.7, 0.25, True, "abc"),
    ScanRow("a.jsonl", 1, "", "fine", "unjudged", None, None, None, "abc", "nan", "zu lang: ä"),
]


def test_a_part_is_read_as_it_was_written_and_a_broken_one_is_named(tmp_path: Path) -> None:
    folder = PartFolder(tmp_path / "scan", MANIFEST)
    assert not folder.has(3) and folder.finished is None
    with pytest.raises(Exception, match="object"):  # so that the part cannot be finished
        folder.write(3, [*ROWS, dataclasses.replace(ROWS[0], id=object())])  # type: ignore[arg-type]
    assert not folder.has(3)
    folder.write(3, ROWS)
    assert folder.has(3) and not folder.has(2)
    assert list(folder.read(3)) == [asdict(row) for row in ROWS]
    names = sorted(path.name for path in folder.folder.iterdir())
    assert names == ["part-000003.jsonl", "scan.json"]
    part = folder.folder / names[0]
    whole = part.read_bytes()
    for broken in (whole[: len(whole) // 2 - 20], b"\0" * len(whole)):
        part.write_bytes(broken)
        problem = r"part-000003\.jsonl: the part is broken.*Delete it"
        with pytest.raises(GuardError, match=problem):
            list(folder.read(3))


def test_a_part_is_on_disk_before_named(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A crash of the machine may else leave the name of a file without its content."""
    folder = PartFolder(tmp_path, MANIFEST)
    are_named: list[bool] = []

    def fsync(descriptor: int) -> None:
        are_named.append(folder.has(0))

    monkeypatch.setattr(os, "fsync", fsync)
    folder.write(0, ROWS)
    assert are_named == [False, True]


def test_what_a_living_process_writes_is_left_to_it(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    folder = PartFolder(tmp_path, MANIFEST)
    for name in (f"{host}-{os.getppid()}", f"{host}-{ended.pid}", f"another-{ended.pid}"):
        (tmp_path / f"{name}.unfinished").touch()
    folder.finish(MANIFEST)
    left = {path.name for path in tmp_path.glob("*.unfinished")}
    assert left == {f"{host}-{os.getppid()}.unfinished", f"another-{ended.pid}.unfinished"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sources", {"a.jsonl": (6, 7), "b.jsonl": (5, 7)}),
        # Parts are numbered through them: one file would be judged twice, the other never.
        ("sources", {"b.jsonl": (5, 7), "a.jsonl": (5, 7)}),
        ("rules", {"fine": "def"}),
        ("rows_a_part", 11),
        ("model", "minilm"),
        ("engines", {"tiny": {"context_tokens": 512}}),
    ],
)
def test_the_folder_of_another_scan_is_not_gone_on_with(
    tmp_path: Path, key: str, value: object
) -> None:
    PartFolder(tmp_path, MANIFEST)
    with pytest.raises(GuardError, match=rf"changed: [a-z ]*{key}\).*FORCE=1"):
        PartFolder(tmp_path, dataclasses.replace(MANIFEST, **{key: value}))  # type: ignore[arg-type]


def test_a_scan_is_deleted_and_nothing_else_is(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    scan = tmp_path / "scan"
    PartFolder(scan, MANIFEST).write(0, ROWS)
    for name in ("replay.json", "replay.html", "here-1.unfinished", "scan.json.here-1.part"):
        (scan / name).touch()
    for foreign in ("notes.txt", "part-of-mine.txt", "replay.csv"):
        (scan / foreign).write_text("mine")
        with pytest.raises(GuardError, match=rf"more than a scan in it \(got {foreign}\).*OUT="):
            delete_scan(scan)
        (scan / foreign).unlink()
    assert len(list(scan.iterdir())) == 6
    deleted: list[str] = []
    unlink = Path.unlink

    def watched(path: Path) -> None:
        deleted.append(path.name)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", watched)
    delete_scan(scan)
    assert list(scan.iterdir()) == [] and deleted[-1] == "scan.json"
    (tmp_path / "notes.txt").touch()
    delete_scan(tmp_path)
    delete_scan(tmp_path / "nowhere")
    assert (tmp_path / "notes.txt").is_file()


def test_a_file_a_foreign_folder_or_a_broken_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GuardError, match="holds no scan"):
        PartFolder(tmp_path, MANIFEST)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(GuardError, match=r"the folder cannot be created.*OUT="):
        PartFolder(tmp_path / "file", MANIFEST)
    (tmp_path / "scan.json").write_text("{")
    with pytest.raises(GuardError, match=r"the file is broken.*FORCE=1"):
        PartFolder(tmp_path, MANIFEST)
