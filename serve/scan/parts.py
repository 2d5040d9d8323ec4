"""What a scan writes: a folder of parts, each of `rows_a_part` conversations and written whole.

A part has one row per conversation and rule, in the order of the conversations. `scan.json` says
what was scanned by what; parts that exist are not computed again. Knows nothing of engines.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from serve.scan.manifest import ScanManifest

MANIFEST = "scan.json"
UNFINISHED = ".unfinished"


@dataclass(frozen=True)
class ScanRow:
    """What a rule says of a conversation; `reason` is why it is `unjudged`, else empty.

    Where it has no verdict, `p_violation`, `threshold` and `confident` are None.
    """

    source: str
    row: int
    id: str
    rule: str
    verdict: Literal["allow", "violation", "unjudged"]
    p_violation: float | None
    threshold: float | None
    confident: bool | None
    weights_sha256: str
    reason: str = ""


def delete_scan(folder: Path) -> None:
    """Delete the scan that a folder holds, if it holds one.

    Under another name first: if this is killed, what is left is in nobody's way, and the next call
    deletes it. Raises GuardError for a link, and for the folder that this process is in.
    """
    if not (folder / MANIFEST).is_file():
        return
    if folder.is_symlink() or Path.cwd().is_relative_to(folder.resolve()):
        problem = "a link or the current folder is not deleted"
        raise GuardError(problem, where=folder, remedy="Name another folder with OUT=")
    deleted = folder.with_name(f".{folder.name}.deleted")
    shutil.rmtree(deleted, ignore_errors=True)
    folder.rename(deleted)
    shutil.rmtree(deleted)


class PartFolder:
    """The parts of one scan. Raises GuardError if the folder holds something else, or is none."""

    def __init__(self, folder: Path, manifest: ScanManifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._refuse_others()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the folder cannot be created: {error.strerror}"
            raise GuardError(problem, where=folder, remedy="Name another one with OUT=") from error
        if self._stored() is None:
            self._write(manifest)

    @property
    def finished(self) -> dict[str, Any] | None:
        """The manifest, if the scan is complete."""
        stored = self._stored()
        if stored is None or not stored["is_finished"]:
            return None
        return stored

    def has(self, number: int) -> bool:
        """Whether a part exists."""
        return self._part(number).is_file()

    def write(self, number: int, rows: Sequence[ScanRow]) -> None:
        """Write a part, whole or not at all.

        Until it is whole its name is of this process alone: one that was given up, and is not dead
        yet, may be writing the same part.
        """
        unfinished = self.folder / f"{socket.gethostname()}-{os.getpid()}{UNFINISHED}"
        if self.manifest.format == "parquet":
            _write_parquet(unfinished, rows)
        else:
            lines = [json.dumps(vars(row), ensure_ascii=False) + "\n" for row in rows]
            unfinished.write_text("".join(lines), encoding="utf-8")
        unfinished.replace(self._part(number))

    def numbers(self) -> list[int]:
        """The numbers of the parts that exist, in order."""
        paths = self.folder.glob(f"part-*.{self.manifest.format}")
        return sorted(int(path.stem.removeprefix("part-")) for path in paths)

    def read(self, number: int) -> Iterator[dict[str, Any]]:
        """The rows of a part that exists."""
        path = self._part(number)
        if self.manifest.format == "parquet":
            import pyarrow.parquet

            yield from pyarrow.parquet.read_table(path).to_pylist()
            return
        for line in path.read_bytes().splitlines():
            yield json.loads(line)

    def finish(self, manifest: ScanManifest) -> None:
        """Record that all parts exist, and delete what killed processes left unfinished."""
        for path in self.folder.glob(f"*{UNFINISHED}"):
            path.unlink(missing_ok=True)
        self._write(manifest)

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.{self.manifest.format}"

    def _stored(self) -> dict[str, Any] | None:
        path = self.folder / MANIFEST
        if not path.is_file():
            return None
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            remedy = "Name another folder with OUT=, or begin anew with FORCE=1"
            raise GuardError(f"the file is broken: {error}", where=path, remedy=remedy) from error

    def _write(self, manifest: ScanManifest) -> None:
        with atomic_write(self.folder / MANIFEST) as part:
            part.write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")

    def _refuse_others(self) -> None:
        stored = self._stored()
        if stored is None:
            if self.folder.is_dir() and any(self.folder.iterdir()):
                remedy = "Name another folder with OUT="
                raise GuardError("the folder holds no scan", where=self.folder, remedy=remedy)
            return
        inputs = self.manifest.inputs
        changed = [key for key, value in inputs.items() if stored.get(key) != value]
        if not changed and list(stored["sources"]) != list(inputs["sources"]):
            changed = ["the order of sources"]  # parts are numbered through them
        if changed:
            raise GuardError(
                "the folder holds a scan of something else",
                where=self.folder,
                got=f"changed: {', '.join(changed)}",
                remedy="Name another folder with OUT=, or begin anew with FORCE=1",
            )


def _write_parquet(path: Path, rows: Sequence[ScanRow]) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        [
            ("source", pyarrow.string()),
            ("row", pyarrow.int64()),
            ("id", pyarrow.string()),
            ("rule", pyarrow.string()),
            ("verdict", pyarrow.string()),
            ("p_violation", pyarrow.float64()),
            ("threshold", pyarrow.float64()),
            ("confident", pyarrow.bool_()),
            ("weights_sha256", pyarrow.string()),
            ("reason", pyarrow.string()),
        ]
    )
    table = pyarrow.Table.from_pylist([vars(row) for row in rows], schema)
    pyarrow.parquet.write_table(table, path, compression="zstd")
