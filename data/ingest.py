"""Your own data -> examples: JSON lines, CSV or a hub data set. Knows nothing of the generator or of models.

A row has a conversation (`messages`, or `text`, or `prompt` and `response`), a `label`, and optionally `id`, `split`,
`group`, `source` and `meta`. Everything is validated before anything else runs; every bad row is named by file and line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data.splits import SHARES, assign, drop_leaks, labels_missing, refuse_straddling
from guard.errors import GuardError
from guard.example import Example, Message, Split, as_line, as_messages
from guard.rule import Rule

HUB = "hub:"
NAMED = 20  # bad rows that an error spells out
LABELS = {
    "1": 1,
    "true": 1,
    "yes": 1,
    "violates": 1,
    "violation": 1,
    "0": 0,
    "false": 0,
    "no": 0,
    "allowed": 0,
    "allows": 0,
}
ACCEPTED = "{} for a violation, {} otherwise".format(
    *(", ".join(word for word in LABELS if LABELS[word] == label) for label in (1, 0))
)
UNSPLIT = "unsplit"
TOO_DEEP = "nested too deeply"
SPLIT_NAMES: dict[str, Split] = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test",
}  # fmt: skip

Splitting = Literal["keep", "clean", "new"]


@dataclass(frozen=True)
class Row:
    """One row as found, without its empty fields, and where; `problem` says why it could not be read at all."""

    where: str
    fields: dict[str, Any]
    problem: str = ""


@dataclass(frozen=True)
class Parsed:
    """A good row and where it stands; `split` is None where the row names none (the example then says `train` until it is dealt out)."""

    example: Example
    split: Split | None
    where: str


@dataclass(frozen=True)
class Ingested:
    """The examples of a source, and how many of its rows `clean` has dropped as leaks."""

    examples: list[Example]
    dropped: int


class BadRow(Exception):
    """What is wrong with one row, with the remedy; collected, then raised together."""


def ingest(source: str, rule: Rule, seed: int, splitting: Splitting = "keep") -> Ingested:
    """The examples of a file or a hub data set, in splits. Raises GuardError naming every bad row (the first 20 in full).

    Rows without a split are dealt out by group and label, and so are all rows where `splitting` is `new`. A source with
    a training and a test split but no validation split gets one from its training rows. `clean` removes from the earlier
    split what shares a group or nearly its text with a later one; `keep` leaves that to be refused.
    """
    parsed: list[Parsed] = []
    problems: list[str] = []
    for row in read_rows(source):
        try:
            parsed.append(_parse(row, rule, source))
        except BadRow as problem:
            problems.append(f"{row.where}: {problem}")
        except RecursionError:
            problems.append(f"{row.where}: {TOO_DEEP}")
    problems += _contradictions(parsed)
    if problems:
        shown = "\n  ".join(problems[:NAMED])
        more = f"\n  and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise GuardError(
            f"{len(problems)} bad rows:\n  {shown}{more}",
            where=source,
            remedy="Correct or remove these rows",
        )
    if not parsed:
        raise GuardError(
            "no rows", where=source, remedy="Write one conversation and its label a row"
        )
    _refuse_repeated_ids(parsed, source)
    if splitting == "new":
        examples, dropped = assign([row.example for row in parsed], seed), 0
    else:
        examples, dropped = _into_splits(parsed, seed, source, clean=splitting == "clean")
    if missing := labels_missing(examples):
        dealt_out = splitting == "new" or all(row.split is None for row in parsed)
        raise GuardError(
            "; ".join(missing),
            where=source,
            got=f"{len(parsed)} rows in {len({example.group for example in examples})} groups; near duplicates are one group",
            remedy="Each split needs rows of both labels: add "
            + ("rows in groups of their own" if dealt_out else "rows, or say SPLITS=new"),
        )
    return Ingested(examples, dropped)


def local_files(source: str) -> list[Path]:
    """The files of this machine that a source is read from, hidden ones left out; none where it is a hub id."""
    if not source.startswith(HUB):
        return [Path(source)] if Path(source).is_file() else []
    folder = Path(_hub_name(source)[0])
    found = sorted(folder.rglob("*")) if folder.is_dir() else []
    return [
        file
        for file in found
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def is_hub_id(source: str) -> bool:
    """Whether a source lies on the hub, so that nothing here tells when it changes."""
    return source.startswith(HUB) and not Path(_hub_name(source)[0]).is_dir()


def read_rows(source: str) -> Iterator[Row]:
    """The rows of `hub:<data set>` or of a file, by its ending."""
    if source.startswith(HUB):
        yield from _hub(source.removeprefix(HUB))
        return
    path = Path(source)
    endings = [ending for ending in FILE_READERS if path.name.endswith(ending)]
    if not endings:
        raise GuardError(
            "cannot read this kind of file",
            where=source,
            remedy=f"Known: {', '.join(FILE_READERS)}, or {HUB}<data set>",
        )
    if not path.is_file():
        raise GuardError(
            "no such file", where=source, remedy="Bring it back, or name where the rows are now"
        )
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise GuardError(
            f"not readable as UTF-8 text: {error}", where=source, remedy="Save the file as UTF-8"
        ) from error
    yield from FILE_READERS[endings[0]](text, source)


def _json_lines(text: str, source: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            fields = _from_json(line)
        except BadRow as problem:
            yield Row(where, {}, f"not valid JSON ({problem}): one object per line")
            continue
        if isinstance(fields, dict):
            yield Row(where, _given(fields))
        else:
            yield Row(where, {}, f"must be an object, got {type(fields).__name__}")


def _from_json(text: str) -> Any:
    """What a JSON text says. Raises BadRow in a few words where it is none, or one that nothing else could read."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadRow(f"{error.msg} at column {error.colno}") from error
    except ValueError as error:
        raise BadRow("a number of thousands of digits") from error
    except RecursionError as error:
        raise BadRow(TOO_DEEP) from error


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Without nulls: a field that is null is a field that is not there."""
    return {name: value for name, value in fields.items() if value is not None}


def _csv(text: str, source: str) -> Iterator[Row]:
    csv.field_size_limit(
        max(csv.field_size_limit(), len(text))
    )  # a cell may be as long as its file
    reader = csv.reader(io.StringIO(text), strict=True)
    names: list[str] = []
    while True:
        where = f"{source}:{reader.line_num + 1}"  # the line the row begins on: a quoted cell may hold line breaks
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield Row(where, {}, f"not valid CSV ({error}): check the quotes from here on")
            return
        if cells is None:
            return
        if not cells:  # a blank line
            continue
        if not names:
            names = [name.strip() for name in cells]
        elif len(cells) > len(names):
            yield Row(where, {}, "more cells than columns: put text with commas in quotes")
        else:
            yield Row(where, {name: cell for name, cell in zip(names, cells, strict=False) if cell})


def _hub(name: str) -> Iterator[Row]:
    """A hub data set, `org/name` or `org/name:configuration`, or a local folder that `datasets` can load. Read row by row, not cached."""
    from datasets import (
        ClassLabel,
        load_dataset,
    )  # takes seconds to import and only this source needs it
    from datasets.exceptions import DatasetNotFoundError

    path, configuration = _hub_name(HUB + name)
    try:
        splits = load_dataset(path, configuration or None, streaming=True)
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError, ValueError) as error:
        raise GuardError(
            f"cannot load the data set: {' '.join(str(error).split())}",
            where=HUB + name,
            remedy="Check the name, your connection, and your access (`hf auth login`)",
        ) from error
    for split, rows in splits.items():
        label = (rows.features or {}).get("label")
        for number, fields in enumerate(rows):
            fields = _given(fields)
            index = fields.get("label")
            if (
                isinstance(label, ClassLabel)
                and isinstance(index, int)
                and 0 <= index < label.num_classes
            ):
                fields["label"] = label.int2str(
                    index
                )  # the word, never its index: in ["unsafe", "safe"] 1 means allowed
            if len(splits) > 1:
                fields.setdefault("split", str(split))
            yield Row(f"{HUB}{path}[{split}]:{number}", fields)


def _hub_name(source: str) -> tuple[str, str]:
    """The data set or folder that `hub:…` names, and its configuration, which may be empty."""
    path, _, configuration = source.removeprefix(HUB).partition(":")
    return path, configuration


FILE_READERS: dict[str, Callable[[str, str], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".csv": _csv,
    ".csv.gz": _csv,
}


def _parse(row: Row, rule: Rule, source: str) -> Parsed:
    fields = row.fields
    if row.problem:
        raise BadRow(row.problem)
    if fields.get("rule", rule.id) != rule.id:
        raise BadRow(
            f"the row is for the rule {fields['rule']!r}, not {rule.id!r}: its label answers another question"
        )
    meta = _json_cell(fields.get("meta", {}), "meta")
    if not isinstance(meta, dict):
        raise BadRow(f"meta must be an object, got {str(meta)[:60]!r}")
    meta = _given(meta)
    named = str(fields.get("split", UNSPLIT)).strip().lower()
    split = SPLIT_NAMES.get(named)
    if split is None and named != UNSPLIT:
        raise BadRow(f"unknown split {fields['split']!r}: use {', '.join(SPLIT_NAMES)}")
    identity = str(fields.get("id", row.where))
    try:
        messages = conversation(fields, rule)
    except GuardError as error:
        raise BadRow(str(error)) from error
    example = Example(
        id=identity,
        rule=rule.id,
        messages=messages,
        label=_label(fields),
        split=split or "train",
        source=str(fields.get("source", source)),
        group=str(fields.get("group", meta.get("group", identity))),
        meta={**meta, "stratum": "real"},
    )
    try:
        as_line(example)
    except UnicodeEncodeError as error:
        found = ascii(error.object[max(0, error.start - 30) : error.end])
        raise BadRow(
            f"half of a surrogate pair, which is no Unicode text, in id, group, source or meta, after {found}"
        ) from error
    except (TypeError, ValueError) as error:
        raise BadRow(f"meta must be JSON: {error}") from error
    return Parsed(example, split, row.where)


def _contradictions(parsed: list[Parsed]) -> Iterator[str]:
    """Rows that repeat a conversation with the other label, each with the row it contradicts."""
    first_with: dict[tuple[Message, ...], Parsed] = {}
    for row in parsed:
        first = first_with.setdefault(row.example.messages, row)
        if first.example.label != row.example.label:
            yield f"{row.where}: label {row.example.label}, but the same conversation has label {first.example.label} in {first.where}"


def conversation(fields: dict[str, Any], rule: Rule) -> tuple[Message, ...]:
    """From `messages`, or `prompt` and `response`, or `text` (said by whom the rule judges). Raises BadRow or GuardError."""
    if "messages" in fields:
        messages = as_messages(_json_cell(fields["messages"], "messages"), where="messages")
    elif "prompt" in fields or "response" in fields:
        if not all(isinstance(fields.get(key), str) for key in ("prompt", "response")):
            raise BadRow("prompt and response must both be there, as text")
        messages = (Message("user", fields["prompt"]), Message("assistant", fields["response"]))
    elif "text" in fields:
        if not isinstance(fields["text"], str):
            raise BadRow(f"text must be text, got {fields['text']!r:.60}")
        messages = (
            Message("user" if rule.judged == "conversation" else rule.judged, fields["text"]),
        )
    else:
        raise BadRow(
            f"no conversation: needs messages, or prompt and response, or text; got {', '.join(fields) or 'nothing'}"
        )
    if not any(message.content.strip() for message in messages):
        raise BadRow("the conversation is empty")
    return messages


def _label(fields: dict[str, Any]) -> int:
    value = fields.get("label")
    word = (
        str(int(value) if isinstance(value, float) and value.is_integer() else value)
        .strip()
        .lower()
    )
    if word not in LABELS:
        found = "no label" if value is None else f"unknown label {value!r}"
        raise BadRow(f"{found}: use {ACCEPTED}")
    return LABELS[word]


def _json_cell(value: Any, name: str) -> Any:
    """A cell of a CSV file that holds JSON."""
    if not isinstance(value, str):
        return value
    try:
        return _from_json(value)
    except BadRow as problem:
        raise BadRow(f"{name} must be JSON: {problem}") from problem


def _refuse_repeated_ids(parsed: list[Parsed], source: str) -> None:
    counts = Counter(row.example.id for row in parsed)
    repeated = [identity for identity, count in counts.items() if count > 1]
    if repeated:
        raise GuardError(
            f"{len(repeated)} ids occur more than once",
            where=source,
            got=", ".join(repeated[:NAMED]),
            remedy="Give every row an id of its own, or none",
        )


def _into_splits(
    parsed: list[Parsed], seed: int, source: str, *, clean: bool
) -> tuple[list[Example], int]:
    """Deal out rows without a split; carve a missing validation split from the training rows. Also: how many rows `clean` dropped.

    Leaks are looked for in the rows as given, because dealing out puts near duplicates into one group, under one name.
    """
    given = {row.split for row in parsed}
    examples = [row.example for row in parsed]
    if given == {None}:
        return assign(examples, seed), 0
    if None in given:
        raise GuardError(
            "some rows have a split and some have none",
            where=source,
            remedy="Give every row a split, or none, or say SPLITS=new",
        )
    if clean:
        examples = drop_leaks(examples)
    else:
        refuse_straddling(examples)
    dropped = len(parsed) - len(examples)
    if given == {"train", "test"}:
        kept = SHARES["train"] + SHARES["validation"]
        shares: dict[Split, float] = {
            "train": SHARES["train"] / kept,
            "validation": SHARES["validation"] / kept,
        }
        dealt = assign([example for example in examples if example.split == "train"], seed, shares)
        examples = dealt + [example for example in examples if example.split == "test"]
    return examples, dropped
