"""A labelled conversation and its JSON-lines file. Knows nothing of prompts or models."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.files.strict_json import read_json

ROLES = ("system", "user", "assistant", "tool")
LONG_TURN = 1_000  # characters; a longer turn is a long one
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
FEWEST_ROWS = 2  # of either label in a split
GENERATOR = "generator"  # the `source` of rows that the offline generator wrote
GENERATOR_AND = f"{GENERATOR}+"  # before a file of rows: generated ones beside them
REAL = "real"  # the `meta.stratum` of own rows
# The `meta.stance` of generated allowed rows that look like a violation.
LOOKS_LIKE = ("quotes", "supposes", "resembles", "asks", "does")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise GuardError("unknown role", got=self.role, remedy=f"Known: {', '.join(ROLES)}")
        if not self.content.isascii() and _SURROGATE.search(self.content):
            problem = "the content is not Unicode text: half of a surrogate pair"
            remedy = "Write the whole character, in JSON both halves of its pair"
            raise GuardError(problem, got=ascii(self.content)[:60], remedy=remedy)


@dataclass(frozen=True)
class Example:
    """A conversation with its label for one rule (1 = violates). Rows of one `group` never straddle
    splits. `twin` is what an own row says of itself; of any row ask `is_twin`.
    """

    id: str
    rule: str
    messages: tuple[Message, ...]
    label: int
    split: Split
    source: str
    group: str
    meta: dict[str, Any] = field(default_factory=dict)
    twin: bool = False

    def __post_init__(self) -> None:
        if type(self.label) is not int or self.label not in (0, 1):
            remedy = "Write 1 for a violation, 0 otherwise"
            raise GuardError("label must be 0 or 1", got=repr(self.label), remedy=remedy)
        if self.split not in SPLITS:
            remedy = f"Known: {', '.join(SPLITS)}"
            raise GuardError("unknown split", got=repr(self.split), remedy=remedy)
        if type(self.twin) is not bool:
            remedy = "Write true for a harmless conversation that looks like a violation"
            raise GuardError("twin must be true or false", got=repr(self.twin), remedy=remedy)
        if self.twin and self.label:
            remedy = "Write label 0, or leave twin out"
            raise GuardError("a twin is harmless, but the row violates the rule", remedy=remedy)

    @property
    def is_generated(self) -> bool:
        return self.source == GENERATOR and self.meta.get("stratum") != REAL

    @property
    def is_twin(self) -> bool:
        """Whether it is harmless and looks like a violation: of a generated row its stance says."""
        looks_like = self.is_generated and self.meta.get("stance") in LOOKS_LIKE
        return self.twin or (looks_like and not self.label)


def as_messages(value: Any, *, where: object) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        problem = "messages must be a non-empty list of {role, content}"
        remedy = 'For example [{"role": "user", "content": "Hello"}]'
        raise GuardError(problem, where=where, got=repr(value)[:60], remedy=remedy)
    return tuple(_as_message(item, turn, where) for turn, item in enumerate(value))


def _as_message(item: Any, turn: int, where: object) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("content"), str):
        problem = f"turn {turn} must be {{role, content}} with a text content"
        remedy = 'For example {"role": "user", "content": "Hello"}'
        raise GuardError(problem, where=where, got=repr(item)[:60], remedy=remedy)
    try:
        return Message(str(item.get("role")), item["content"])
    except GuardError as error:
        problem = f"turn {turn}: {error.problem}"
        raise GuardError(problem, where=where, got=error.got, remedy=error.remedy) from error


def read_examples(path: Path) -> list[Example]:
    if not path.is_file():
        raise GuardError("no such file", where=path, remedy="Run `make data` first")
    examples = []
    # As bytes: str.splitlines would also break at Unicode line separators inside the texts.
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            row = read_json(line)
            row["messages"] = as_messages(row["messages"], where="messages")
            examples.append(Example(**row))
        except (GuardError, ValueError, KeyError, TypeError) as error:
            remedy = "Write the file again: `make data FORCE=1`"
            raise GuardError(f"not an example: {error}", where=where, remedy=remedy) from error
    return examples


def write_examples(path: Path, examples: Iterable[Example]) -> str:
    """Write JSON lines; return the file's SHA-256."""
    content = b"".join(as_line(example) for example in examples)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def as_line(example: Example) -> bytes:
    """The example as it stands in the file. Fails on what JSON in UTF-8 cannot hold."""
    fields = asdict(example)
    if not example.twin:
        del fields["twin"]  # as in files from before there were twins: their digests still hold
    return (json.dumps(fields, ensure_ascii=False) + "\n").encode()
