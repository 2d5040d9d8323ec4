"""Labels that reviewers settled, beside the rows of another source.

They come from a file that `python -m serve.reviews` has written. None is ever a test row: what the
served weights were unsure of is no sample of the traffic.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from data.ingest import SourcedData, parse_all
from data.rows import read_rows
from data.splits import near_duplicates
from guard.conversation.example import Example
from guard.errors import GuardError
from guard.rule import Rule

AND_REVIEWS = "+reviews"  # behind the text that names another source
ONE_IN = 5  # groups that validate


def with_reviews(sourced: SourcedData, file: Path, rule: Rule) -> SourcedData:
    """The data of another source with the reviewed rows that are not, or not nearly, in them, nor
    of a group that is.
    """
    if not file.is_file():
        remedy = f"`make data RULE={rule.id} DATA=...{AND_REVIEWS}` writes it from the reviews"
        raise GuardError("no such file", where=file, remedy=remedy)
    rows = list(read_rows(str(file)))
    reviewed: list[Example] = []
    for parsed in parse_all(rows, rule, str(file)) if rows else ():
        reviewed.append(_in_split(parsed.example))
    examples = [*sourced.examples, *reviewed]
    near = {pair.second for pair in near_duplicates(examples)}
    groups = {example.group for example in sourced.examples}
    new: list[Example] = []
    for index, example in enumerate(reviewed, start=len(sourced.examples)):
        if index not in near and example.group not in groups:
            new.append(example)
    counts = {"rows": len(new), "repeated": len(reviewed) - len(new)}
    notes = sourced.notes | {"reviews": counts}
    return replace(sourced, examples=[*sourced.examples, *new], notes=notes)


def _in_split(example: Example) -> Example:
    digest = hashlib.sha256(example.group.encode()).hexdigest()
    if int(digest, 16) % ONE_IN:
        return replace(example, split="train", source="reviews")
    return replace(example, split="validation", source="reviews")
