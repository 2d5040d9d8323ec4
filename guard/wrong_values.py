"""What pydantic finds wrong with a value, in words for whoever wrote it.

Where a value may be of several types, pydantic names the problems of every type, each under the
type's name. Here only the type that fits best is named, or all of them where none fits better.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LONGEST_SHOWN = 60  # characters of a value
OBJECT_TYPES = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
SAY = "Input should be "

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class WrongValue:
    """One problem at `path`, of pydantic's `kind`; `got` is empty where the value says nothing."""

    path: Path
    kind: str
    problem: str
    got: str = ""

    @property
    def key(self) -> str:
        return ".".join(str(part)[:LONGEST_SHOWN] for part in self.path)

    def __str__(self) -> str:
        words = f"{self.key}: {self.problem}".removeprefix(": ")
        return f"{words}, got {self.got}" if self.got else words


def wrong_values(problems: Iterable[Mapping[str, Any]], content: Any) -> list[WrongValue]:
    choices: dict[Path, dict[str | int, list[WrongValue]]] = {}  # by the value of several types
    values: list[WrongValue] = []
    for problem in problems:
        path, choice = _path(problem, content)
        value = WrongValue(path, problem["type"], _words(problem), _got(problem))
        if choice is None:
            values.append(value)
        else:
            choice_path, name = choice
            choices.setdefault(choice_path, {}).setdefault(name, []).append(value)
    for types in choices.values():
        values += _nearest(types)
    return values


def _path(problem: Mapping[str, Any], content: Any) -> tuple[Path, tuple[Path, str | int] | None]:
    """The keys and indices of a problem's location; and of the first name of a type among them, the
    path to its value and the name.
    """
    path: list[str | int] = []
    choice = None
    location: Path = tuple(problem["loc"])
    for number, part in enumerate(location, start=1):
        is_key = isinstance(content, dict) and part in content
        is_index = isinstance(content, list) and isinstance(part, int) and part < len(content)
        if is_key or is_index:
            content = content[part]
            path.append(part)
        elif number == len(location) and problem["type"] in ("missing", "extra_forbidden"):
            path.append(part)
        elif choice is None:
            choice = (tuple(path), part)
    return tuple(path), choice


def _nearest(types: Mapping[str | int, list[WrongValue]]) -> list[WrongValue]:
    best = max(map(_nearness, types.values()))
    joined: dict[Path, WrongValue] = {}
    nearest = [values for values in types.values() if _nearness(values) == best]
    for values in nearest:
        for value in values:
            before = joined.setdefault(value.path, value)
            if value.problem.removeprefix(SAY) not in before.problem:
                problem = f"{before.problem} or {value.problem.removeprefix(SAY)}"
                joined[value.path] = WrongValue(value.path, value.kind, problem, value.got)
    return list(joined.values())


def _nearness(values: list[WrongValue]) -> tuple[int, bool, int]:
    """How deep inside it a value is wrong, whether by more than its kind, and in how few places."""
    deepest = max(len(value.path) for value in values)
    is_of_kind = not all(value.kind.endswith("_type") for value in values)
    return deepest, is_of_kind, -len(values)


def _words(problem: Mapping[str, Any]) -> str:
    if problem["type"] in OBJECT_TYPES:
        return f"{SAY}an object"
    message: str = problem["msg"]
    return message.removeprefix("Value error, ").replace(" after validation", "")


def _got(problem: Mapping[str, Any]) -> str:
    value, kind = problem["input"], problem["type"]
    if kind in ("missing", "extra_forbidden"):
        return ""
    if isinstance(value, str):
        return repr(value[:LONGEST_SHOWN])
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)[:LONGEST_SHOWN]
    if kind.endswith("_type"):
        return "a list" if isinstance(value, list | tuple) else "an object"
    return ""
