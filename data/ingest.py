"""Your own rows -> examples, from wherever the rows are read.

A row has a conversation (`guard/conversation/row.py` says how), a `label`, and optionally `id`,
`split`, `group`, `source`, `twin` and `meta`. Everything is validated before anything else runs;
every bad row is named by file and line.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from data.rows import TOO_DEEP, BadRow, SourceRow, without_nulls
from data.splits import SHARES, assign, group_near_duplicates, labels_scarce, refuse_straddling
from guard.conversation.chat import unread_parts
from guard.conversation.example import FEWEST_ROWS, REAL, Example, Message, Split, as_line
from guard.conversation.row import conversation_of, json_cell
from guard.errors import GuardError
from guard.rule import Rule

NAMED = 20  # problems that an error spells out
PLACES = 3  # rows with one problem that are named
# What differs between two rows with the same problem: what is quoted of them, and numbers.
OF_ONE_ROW = re.compile(r"'[^']*'|\d+")
VIOLATING_WORDS = ("1", "true", "yes", "violates", "violation")
ALLOWED_WORDS = ("0", "false", "no", "allowed", "allows")
LABEL_WORDS = dict.fromkeys(VIOLATING_WORDS, 1) | dict.fromkeys(ALLOWED_WORDS, 0)
ACCEPTED = f"{', '.join(VIOLATING_WORDS)} for a violation, {', '.join(ALLOWED_WORDS)} otherwise"
UNSPLIT = "unsplit"
KNOWN_FIELDS = (
    *("messages", "tools", "system", "prompt", "response", "text"),
    *("label", "rule", "id", "split", "group", "source", "twin", "meta"),
)
SINGULAR = ("label", "id", "split", "group", "twin")
# Empty in a row they are not there, as an empty cell of a CSV file is not.
ABSENT_IF_EMPTY = ("id", "source", "split", "group")
SPLIT_NAMES: dict[str, Split] = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}

Splitting = Literal["keep", "new"]


@dataclass(frozen=True)
class Parsed:
    """A good row and where it stands. The example of a row without a `split` says `train`."""

    example: Example
    split: Split | None
    where: str


@dataclass(frozen=True)
class SourcedData:
    """The examples in splits, and manifest fields."""

    examples: list[Example]
    notes: dict[str, Any] = field(default_factory=dict)


def ingest(
    rows: Iterable[SourceRow],
    source: str,
    rule: Rule,
    seed: int,
    splitting: Splitting = "keep",
    shares: Mapping[Split, float] = SHARES,
    fewest: int = FEWEST_ROWS,
) -> SourcedData:
    """The examples of the rows of `source`, in splits.

    Rows without a split are assigned to splits by group and label in `shares`, and so are all rows
    where `splitting` is `new`. A missing validation split is taken from the training rows. Raises
    GuardError naming the bad rows, and for a split with fewer than `fewest` rows of a label.
    """
    parsed = parse_all(rows, rule, source)
    _refuse_repeated_ids(parsed, source)
    if splitting == "new":
        examples = assign([row.example for row in parsed], seed, shares)
    else:
        examples = _into_splits(parsed, seed, source, shares)
    scarce = labels_scarce(examples, fewest)
    if scarce:
        groups = {example.group for example in examples}
        remedy = f"Each split needs {fewest} rows of either label: add some"
        if splitting == "new" or all(row.split is None for row in parsed):
            remedy += " in groups of their own"
        else:
            remedy += ", or say SPLITS=new"
        got = f"{len(parsed)} rows in {len(groups)} groups; near duplicates are one group"
        raise GuardError("; ".join(scarce), where=source, got=got, remedy=remedy)
    return SourcedData(examples)


def parse_all(rows: Iterable[SourceRow], rule: Rule, source: str) -> list[Parsed]:
    """Raises GuardError naming the bad rows, and for none."""
    parsed: list[Parsed] = []
    problems: list[tuple[str, GuardError]] = []  # where, and what
    for row in rows:
        try:
            parsed.append(_parse(row, rule, source))
        except GuardError as error:
            problems.append((row.where, error))
        except RecursionError:
            problems.append((row.where, BadRow(TOO_DEEP)))
    problems += _contradictions(parsed)
    if problems:
        problem = "\n  ".join([f"{len(problems)} bad rows:", *_each_kind(problems)])
        remedy = "Correct or remove these rows"
        raise GuardError(problem, where=source, remedy=remedy)
    if not parsed:
        problem = "no rows: the source is empty, or has a header alone"
        remedy = "Write one conversation and its label a row"
        raise GuardError(problem, where=source, remedy=remedy)
    return parsed


def _each_kind(problems: Iterable[tuple[str, GuardError]]) -> list[str]:
    """A line for each kind of problem: its first row in full, and how many rows more have it."""
    by_kind: dict[str, list[tuple[str, GuardError]]] = defaultdict(list)
    for where, error in problems:
        by_kind[OF_ONE_ROW.sub("", error.problem)].append((where, error))
    lines = []
    for (where, error), *more in by_kind.values():
        line = f"{where}: {error}"
        if more:
            places = ", ".join(place for place, _ in more[:PLACES])
            line += f" ({len(more)} more like it; next {places})"
        lines.append(line)
    if len(lines) > NAMED:
        lines[NAMED:] = [f"and {len(lines) - NAMED} other problems"]
    return lines


def _parse(row: SourceRow, rule: Rule, source: str) -> Parsed:
    if row.problem:
        raise BadRow(row.problem)
    empty = [name for name in ABSENT_IF_EMPTY if row.fields.get(name) == ""]
    fields = {name: value for name, value in row.fields.items() if name not in empty}
    if fields.get("rule", rule.id) != rule.id:
        problem = f"the row is for the rule {fields['rule']!r}, not {rule.id!r}"
        raise BadRow(f"{problem}: its label answers another question")
    _refuse_misspelt(fields)
    meta = _meta(fields)
    split = _split(fields)
    identity = str(fields.get("id", row.where))
    messages = conversation(fields, rule)
    example = Example(
        id=identity,
        rule=rule.id,
        messages=messages,
        label=_label(fields),
        split=split or "train",
        source=str(fields.get("source", source)),
        group=_group(fields, meta) or identity,
        meta={**meta, "stratum": REAL},
        twin=json_cell(fields.get("twin", False), "twin"),
    )
    _refuse_unwritable(example)
    return Parsed(example, split, row.where)


def _refuse_misspelt(fields: dict[str, Any]) -> None:
    """Refuse a field that is nearly one of ours: its row would be in another split or group."""
    spellings = {name: name for name in KNOWN_FIELDS}
    spellings |= {f"{name}s": name for name in SINGULAR}
    for name in fields:
        meant = spellings.get(str(name).strip().lower())
        if meant and meant not in fields:
            raise BadRow(f"unknown field {name!r}: write {meant!r}, or call it something else")


def _group(fields: dict[str, Any], meta: dict[str, Any]) -> str:
    for value in (fields.get("group"), meta.get("group")):
        if value is not None and str(value).strip():
            return str(value).strip()
    return ""


def _meta(fields: dict[str, Any]) -> dict[str, Any]:
    meta = json_cell(fields.get("meta", {}), "meta")
    if not isinstance(meta, dict):
        raise BadRow(f"meta must be an object, got {str(meta)[:60]!r}")
    return without_nulls(meta)


def _split(fields: dict[str, Any]) -> Split | None:
    name = str(fields.get("split", UNSPLIT)).strip().lower()
    if name not in SPLIT_NAMES and name != UNSPLIT:
        raise BadRow(f"unknown split {fields['split']!r}: use {', '.join(SPLIT_NAMES)}")
    return SPLIT_NAMES.get(name)


def _refuse_unwritable(example: Example) -> None:
    try:
        as_line(example)
    except UnicodeEncodeError as error:
        before = ascii(error.object[max(0, error.start - 30) : error.end])
        problem = "half of a surrogate pair, which is no Unicode text, in id, group, source or meta"
        raise BadRow(f"{problem}, after {before}") from error
    except (TypeError, ValueError) as error:
        raise BadRow(f"meta must be JSON: {error}") from error


def _contradictions(parsed: list[Parsed]) -> Iterator[tuple[str, GuardError]]:
    first_with: dict[tuple[Message, ...], Parsed] = {}
    for row in parsed:
        first = first_with.setdefault(row.example.messages, row)
        if first.example.label != row.example.label:
            problem = f"label {row.example.label}, but the same conversation has label "
            problem += f"{first.example.label} in {first.where}"
            yield row.where, BadRow(problem)


def conversation(fields: dict[str, Any], rule: Rule) -> tuple[Message, ...]:
    """The row's conversation; a `text` is said by whom the rule judges. Raises GuardError."""
    text_role = rule.judged
    if rule.judged == "conversation":
        text_role = "user"
    messages = conversation_of(fields, text_role)
    if unread := unread_parts(messages):
        raise BadRow(f"{unread[0]}, which no rule can read: say in words what it says or shows")
    return messages


def _label(fields: dict[str, Any]) -> int:
    value = fields.get("label")
    if value is None:
        raise BadRow(f"no label: use {ACCEPTED}")
    word = str(value).strip().lower()
    if isinstance(value, float) and value.is_integer():
        word = str(int(value))
    if word not in LABEL_WORDS:
        raise BadRow(f"unknown label {value!r}: use {ACCEPTED}")
    return LABEL_WORDS[word]


def _refuse_repeated_ids(parsed: list[Parsed], source: str) -> None:
    counts = Counter(row.example.id for row in parsed)
    repeated = [identity for identity, count in counts.items() if count > 1]
    if repeated:
        problem = f"{len(repeated)} ids occur more than once"
        remedy = "Give every row an id of its own, or none"
        raise GuardError(problem, where=source, got=", ".join(repeated[:NAMED]), remedy=remedy)


def _into_splits(
    parsed: list[Parsed], seed: int, source: str, shares: Mapping[Split, float]
) -> list[Example]:
    splits = {row.split for row in parsed}
    examples = [row.example for row in parsed]
    if splits == {None}:
        return assign(examples, seed, shares)
    if None in splits:
        problem = "some rows have a split and some have none"
        remedy = "Give every row a split, or none, or say SPLITS=new"
        raise GuardError(problem, where=source, remedy=remedy)
    refuse_straddling(examples)  # before near duplicates become one group under one name
    if splits == {"train", "test"}:
        total = shares["train"] + shares["validation"]
        parts: tuple[Split, ...] = ("train", "validation")
        train = [example for example in examples if example.split == "train"]
        test = [example for example in examples if example.split == "test"]
        examples = assign(train, seed, {part: shares[part] / total for part in parts}) + test
    return group_near_duplicates(examples)
