"""The folders that a cluster serves, copied as they were when they were admitted.

A replica that starts later must answer with the weights of the other replicas, whatever lies in a
rule's folder by then. So every folder that is served is copied once under its card's version, and
a file says how each rule is rolled out from which copies. Knows nothing of replicas.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.files.strict_json import load_json
from guard.method import METHODS
from guard.weights.card import CARD, load_card
from serve.registry.rollout import Rollout

SERVED = "served.json"
NAME_DIGITS = 32  # of a version, in the name of a copy
COPYING = ".copy-"  # before the name of a copy that is being made
GONE = ".gone-"  # before that of one that is being deleted

DECIDING_FILES = frozenset(itertools.chain(*(method.files for method in METHODS.values())))

Served = dict[str, Rollout]  # what of each rule is served, by name


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
        self.write({rule: Rollout(folder=self.keep(folder)) for rule, folder in folders.items()})

    def write(self, served: Mapping[str, Rollout]) -> None:
        """Note what is served, whole or not at all."""
        self._root.mkdir(parents=True, exist_ok=True)
        before = self.read() if self.note.is_file() else {}
        noted: dict[str, Any] = {}
        for rule, rollout in served.items():
            noted[rule] = _named(rollout).model_dump(mode="json")
        with atomic_write(self.note) as part:
            part.write_text(json.dumps(noted, indent=2) + "\n", encoding="utf-8")
        for replaced in _folders(before) - _folders(served):
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
            noted_folders |= {folder.name for folder in _folders(self._read(note))}
        for copy in self._root.iterdir():
            if not copy.is_dir() or _age_s(copy) <= unused_for_s:
                continue
            if copy.name.startswith((COPYING, GONE)):
                shutil.rmtree(copy, ignore_errors=True)
            elif not copy.name.startswith(".") and copy.name not in noted_folders:
                discarded = copy.rename(self._root / f"{GONE}{copy.name}")
                shutil.rmtree(discarded, ignore_errors=True)

    def read(self) -> Served:
        """What is served. Raises GuardError if nothing was noted."""
        return self._read(self.note)

    def _read(self, note: Path) -> Served:
        served: Served = {}
        for rule, content in load_json(note, remedy="Start the server again").items():
            try:
                named = Rollout.model_validate_json(json.dumps(content))
            except ValidationError as error:
                remedy = "Delete it, and start the server again"
                raise GuardError(
                    "the note of another program", where=note, remedy=remedy
                ) from error
            served[rule] = _moved(named, self._root.__truediv__)
        return served


def version_of(served: Mapping[str, Rollout]) -> str:
    """The version of these rules: equal where rules, weights, thresholds and modes are."""
    lines = [
        f"{rule} {_named(rollout).model_dump_json()}" for rule, rollout in sorted(served.items())
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _named(rollout: Rollout) -> Rollout:
    """The rollout by the names of its copies alone."""
    return _moved(rollout, lambda folder: Path(folder.name))


def _moved(rollout: Rollout, move: Callable[[Path], Path]) -> Rollout:
    """The rollout with other folders."""
    changes: dict[str, object] = {"folder": move(rollout.folder)}
    if rollout.trial is not None:
        folder = move(rollout.trial.folder)
        changes["trial"] = rollout.trial.model_copy(update={"folder": folder})
    return rollout.model_copy(update=changes)


def _folders(served: Mapping[str, Rollout]) -> set[Path]:
    folders = {rollout.folder for rollout in served.values()}
    return folders | {rollout.trial.folder for rollout in served.values() if rollout.trial}


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
