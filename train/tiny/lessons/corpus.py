"""Unlabelled conversations to distil on: local files or hub data sets, cut into windows. Knows
nothing of models.
"""

from __future__ import annotations

import glob
import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.rows import HUB, cannot_load, read_rows
from guard.conversation.example import Message, as_messages
from guard.errors import GuardError


@dataclass(frozen=True)
class CorpusSource:
    """One corpus: its conversations and what the model card says of it.

    `digest` names the content: `sha256:…` of a file, `datasets:…`, the library's own fingerprint,
    of a hub data set. `origins` is where the rows say they come from.
    """

    name: str
    conversations: list[tuple[Message, ...]]
    licences: tuple[str, ...]
    digest: str
    origins: tuple[str, ...] = ()

    @property
    def turns(self) -> int:
        """Messages in all."""
        return sum(len(conversation) for conversation in self.conversations)

    @property
    def texts(self) -> Iterator[str]:
        """What the messages say, one after another."""
        for conversation in self.conversations:
            for message in conversation:
                yield message.content


def read_corpus(spec: str) -> list[CorpusSource]:
    """Read a comma-separated list of JSON-lines paths (globs, optionally gzipped) and `hub:<data
    set>` names.

    Every row holds `messages: [{role, content}, …]` and optionally `license` and `source` (as `data
    set:file`). Raises GuardError if nothing matches.
    """
    sources = []
    for part in filter(None, (part.strip() for part in spec.split(","))):
        if part.startswith(HUB):
            sources.append(_from_hub(part.removeprefix(HUB)))
        else:
            sources += _from_files(part)
    return sources


def _from_files(pattern: str) -> list[CorpusSource]:
    paths = [Path(path) for path in sorted(glob.glob(pattern))]  # noqa: PTH207 - may be absolute
    if not paths:
        raise GuardError(
            "no such corpus file",
            where=pattern,
            remedy="CORPUS takes JSON-lines files of {messages: [...]} or hub:<data set>",
        )
    sources = []
    for path in paths:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        sources.append(_source(path.name, rows_of(path), f"sha256:{digest}"))
    return sources


def rows_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a JSON-lines file, gzipped or not, after where it stands. Raises GuardError at
    one that is no object.
    """
    for row in read_rows(str(path)):
        if row.problem:
            raise GuardError(row.problem, where=row.where, remedy="Correct the row, or take it out")
        yield row.where, row.fields


def _from_hub(name: str) -> CorpusSource:
    from datasets import load_dataset

    try:
        data = load_dataset(name, split="train")
    except Exception as error:  # whatever the readers of its many formats raise
        raise cannot_load(f"{HUB}{name}", error) from error
    rows = ((f"{HUB}{name}:{number}", row) for number, row in enumerate(data))
    return _source(name, rows, f"datasets:{data._fingerprint}")


def _source(name: str, rows: Iterable[tuple[str, dict[str, Any]]], digest: str) -> CorpusSource:
    conversations = []
    licences = set()
    origins = set()
    for where, row in rows:
        conversations.append(as_messages(row.get("messages"), where=where))
        licences.add(licence_of(row))
        origins.add(origin_of(row))
    if not conversations:
        raise GuardError(
            "no conversations", where=name, remedy="Name a file of rows with `messages`"
        )
    origins.discard("")
    return CorpusSource(
        name, conversations, tuple(sorted(licences)), digest, tuple(sorted(origins))
    )


def licence_of(row: Mapping[str, Any]) -> str:
    """The licence that a row states."""
    return str(row.get("license") or "not stated")


def origin_of(row: Mapping[str, Any]) -> str:
    """The data set that a row's `source` names, before the file; empty where it names none."""
    return str(row.get("source") or "").partition(":")[0]


def window(conversation: tuple[Message, ...], words: int, rng: random.Random) -> list[Message]:
    """A random run of consecutive turns of about `words` words in all; longer turns are cut, empty
    ones dropped.
    """
    start = rng.randrange(len(conversation))
    taken: list[Message] = []
    room = words
    for message in conversation[start:]:
        text = message.content.split()[: max(room, 1)][:120]
        if text:
            taken.append(Message(message.role, " ".join(text)))
            room -= len(text) + 3
        if room <= 0:
            break
    return taken
