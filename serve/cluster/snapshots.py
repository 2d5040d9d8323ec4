"""The folders that a cluster serves, copied as they were when they were admitted.

A replica that starts later must answer with the weights of the other replicas, whatever lies in a
rule's folder by then. So every folder that is served is copied once under its card's version, and
a file says which rule is served from which copy. Knows nothing of replicas.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.files.strict_json import load_json
from guard.method import METHODS
from guard.weights.card import CARD, load_card

SERVED = "served.json"
NAME_DIGITS = 32  # of a version, in the name of a copy
COPYING = ".copy-"  # before the name of a copy that is being made
GONE = ".gone-"  # before that of one that is being deleted

DECIDING_FILES = frozenset(itertools.chain(*(method.files for method in METHODS.values())))

Folders = dict[str, Path]  # of the rules that are served, by name


class Snapshots:
    """The copies in `root`, which all replicas can read, and which of them are served, as the file
    `note` there says.
    """

    def __init__(self, root: Path, note: str = SERVED) -> None:
        self._root = root
        self.note = root / note

    def keep(self, folder: Path) -> Path:
        """The copy of a folder of weights as it is now.

        Raises GuardError if it is no such folder, has a link that leads out of it, or was written
        to meanwhile.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=COPYING, dir=self._root) as scratch:
            copy = Path(scratch) / "weights"
            copy.mkdir()
            for name in sorted({CARD, *DECIDING_FILES}):
                if (folder / name).is_file():
                    shutil.copyfile(_within(folder, name), copy / name)
            try:
                version = load_card(copy).version  # a copy made during a change is of none
            except GuardError as error:
                raise GuardError(error.problem, where=folder, remedy=error.remedy) from error
            destination = self._root / version[:NAME_DIGITS]
            if destination.is_dir():
                os.utime(destination)  # it is used again: `discard` looks at that
            else:
                copy.rename(destination)
        return destination

    def keep_all(self, folders: Mapping[str, Path]) -> None:
        """Note that copies of these folders are served. Raises as `keep`."""
        self.write({rule: self.keep(folder) for rule, folder in folders.items()})

    def write(self, served: Mapping[str, Path]) -> None:
        """Note what is served, whole or not at all."""
        self._root.mkdir(parents=True, exist_ok=True)
        before = self.read() if self.note.is_file() else {}
        names = {rule: folder.name for rule, folder in served.items()}
        with atomic_write(self.note) as part:
            part.write_text(json.dumps(names, indent=2) + "\n", encoding="utf-8")
        for replaced in set(before.values()) - set(served.values()):
            # The note is written by now, so whatever fails here must not undo the change.
            with contextlib.suppress(OSError):
                os.utime(replaced)  # unused from now on

    def discard(self, unused_for_s: float) -> None:
        """Delete copies that no note names and nobody has kept for so long, and as old parts of
        copies that killed processes have left.

        A copy goes as a whole, by its name, before its files do. Raises GuardError for a note that
        cannot be read, and OSError.
        """
        noted_folders: set[str] = set()
        for note in self._root.glob("*.json"):
            noted_folders |= set(load_json(note, remedy="Start the server again").values())
        for copy in self._root.iterdir():
            if not copy.is_dir() or _age_s(copy) <= unused_for_s:
                continue
            if copy.name.startswith((COPYING, GONE)):
                shutil.rmtree(copy, ignore_errors=True)
            elif not copy.name.startswith(".") and copy.name not in noted_folders:
                discarded = copy.rename(self._root / f"{GONE}{copy.name}")
                shutil.rmtree(discarded, ignore_errors=True)

    def read(self) -> Folders:
        """The folders that are served, by rule. Raises GuardError if nothing was noted."""
        names = load_json(self.note, remedy="Start the server again")
        return {rule: self._root / name for rule, name in names.items()}


def version_of(served: Mapping[str, Path]) -> str:
    """The version of these rules: equal where rules, weights and thresholds are."""
    lines = [f"{rule} {folder.name}" for rule, folder in sorted(served.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _age_s(path: Path) -> float:
    """The seconds since a folder changed; 0 of one that is gone by now, as others delete too."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _within(folder: Path, name: str) -> Path:
    """The file's path, links followed. Raises GuardError for one that leads out of the folder."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        problem, remedy = "a link that leads out of its folder", "Put the file itself there"
        raise GuardError(problem, where=folder / name, remedy=remedy)
    return path
