"""Unlabelled conversations to distil on: local files or hub data sets, cut into windows. Knows nothing of models."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

from guard.errors import GuardError
from guard.example import Message, as_messages


@dataclass(frozen=True)
class Source:
    """One corpus: where it came from, its conversations, and what the model card says of it."""

    name: str
    conversations: list[tuple[Message, ...]]
    licences: tuple[str, ...]
    sha256: str


def read_corpus(spec: str) -> list[Source]:
    """Read a comma-separated list of JSON-lines paths (globs, optionally gzipped) and `hub:<data set>` names.

    Every row holds `messages: [{role, content}, …]` and optionally `license`. Raises GuardError if nothing matches.
    """
    sources = []
    for part in (part.strip() for part in spec.split(",")):
        if part.startswith("hub:"):
            sources.append(_from_hub(part.removeprefix("hub:")))
            continue
        paths = [Path(path) for path in sorted(glob.glob(part))]  # noqa: PTH207 - the pattern may be absolute
        if not paths:
            raise GuardError(
                "no such corpus file", where=part, remedy="CORPUS takes JSON-lines files of {messages: [...]} or hub:<data set>"
            )
        sources += [_from_file(path) for path in paths]
    return sources


def _from_file(path: Path) -> Source:
    raw = path.read_bytes()
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    rows = [json.loads(line) for line in text.decode("utf-8").splitlines()]
    return _source(path.name, rows, hashlib.sha256(raw).hexdigest())


def _from_hub(name: str) -> Source:
    from datasets import load_dataset

    data = load_dataset(name, split="train")
    return _source(name, list(data), str(data._fingerprint))


def _source(name: str, rows: list[dict[str, object]], sha256: str) -> Source:
    conversations = [as_messages(row.get("messages"), where=f"{name}:{number}") for number, row in enumerate(rows, start=1)]
    licences = tuple(sorted({str(row.get("license", "not stated")) for row in rows}))
    return Source(name, conversations, licences, sha256)


def window(conversation: tuple[Message, ...], words: int, rng: random.Random) -> list[Message]:
    """A random run of consecutive turns of about `words` words in all; longer turns are cut, empty ones dropped."""
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
