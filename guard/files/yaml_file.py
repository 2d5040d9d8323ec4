"""Strict YAML to a frozen pydantic model. Knows nothing of what the model means.

PyYAML follows YAML 1.1, where `2e-4` is a string, `no` is false, `010` is 8, `1:30` is 90 and a date is no text. These
are common in recipes and rules, so the loader reads scalars the YAML 1.2 way. A key given twice is refused, not overwritten.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from guard.errors import GuardError


class Strict(BaseModel):
    """Frozen, no unknown keys, no coercion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars and unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{key.value}' is given twice", key.start_mark
                    )
                keys.add(key.value)
        return super().construct_mapping(node, deep)


_YAML_1_2 = {
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?",
        "-+0123456789.",
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in {*_YAML_1_2, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, (_pattern, _first) in _YAML_1_2.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))

Model = TypeVar("Model", bound=BaseModel)


def load(path: Path, model: type[Model]) -> Model:
    """Read `path` as one `model`. Raises GuardError with one line per problem: file, key, what was found, nearest valid name."""
    if not path.is_file():
        raise GuardError("no such file", where=path, remedy=_near_file(path))
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", error)
        raise GuardError(
            f"not valid YAML{line}: {problem}",
            where=path,
            remedy="Correct the file; a text with ':' or '#' needs quotes",
        ) from error
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#x} at {error.start}"
        raise GuardError(
            "not UTF-8 text", where=path, got=found, remedy="Save the file as UTF-8"
        ) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, brackets a thousand deep
        raise GuardError(
            f"a value cannot be read: {error}",
            where=path,
            remedy="Correct it; text that looks like a number needs quotes",
        ) from error
    if not isinstance(content, dict):
        remedy = "Write one `key: value` a line, after the model of the other files there"
        raise GuardError(
            "must be a mapping of keys to values",
            where=path,
            got=type(content).__name__,
            remedy=remedy,
        )
    return validate(content, model, where=path)


def validate(content: Any, model: type[Model], *, where: object) -> Model:
    """`content` as one `model`, or a GuardError that names every bad key."""
    try:
        # By way of JSON, because there strict pydantic lets an array stand for a tuple and leaves free-form lists alone.
        text = json.dumps(content, default=str)
    except (ValueError, TypeError, RecursionError) as error:
        remedy = "Write out what an alias (*name) repeats inside itself; a key is text or a number"
        raise GuardError(
            f"not a tree of keys and values: {error}", where=where, remedy=remedy
        ) from error
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(_line(problem, model) for problem in error.errors())
        raise GuardError(
            problems,
            where=where,
            remedy="Correct these keys, after the model of another file of its kind",
        ) from error


def _line(problem: Any, model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in problem["loc"]) or "content"
    found = repr(problem["input"])[:60]
    if problem["type"] == "extra_forbidden":
        known = _names(model, problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        return f"unknown key '{key}', " + (
            f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
        )
    if problem["type"] == "missing":
        return f"missing key '{key}'"
    message = problem["msg"].removeprefix("Value error, ")
    return f"'{key}': {message[0].lower()}{message[1:]}, got {found}"


def _names(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """The field names valid at `location` inside `model`."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            continue
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                model = inner
    return list(model.model_fields)


def _near_file(path: Path) -> str:
    known = sorted(other.stem for other in path.parent.glob("*.yaml"))
    near = difflib.get_close_matches(path.stem, known, n=1)
    return (f"Did you mean '{near[0]}'? " if near else "") + f"Known: {', '.join(known) or 'none'}"
