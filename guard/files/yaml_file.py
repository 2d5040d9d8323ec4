"""Strict YAML to a frozen pydantic model.

PyYAML follows YAML 1.1, where `2e-4` is a string, `no` is false, `010` is 8, `1:30` is 90 and a
date is no text. These are common in recipes and rules, so the loader reads scalars the YAML 1.2
way. A key given twice is refused, not overwritten.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from guard.errors import GuardError, choose_from, did_you_mean
from guard.files.text_file import read_text
from guard.home import own_or_shipped, yaml_files
from guard.wrong_values import WrongValue, wrong_values

CORRECT_KEYS = "Correct these keys, after the model of another file of its kind"


class Strict(BaseModel):
    """Frozen, no unknown keys, no coercion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Yaml12Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars and unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                problem = f"the key '{key.value}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
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
_NOT_YAML_1_2 = {*_YAML_1_2, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"}


def _resolve_scalars_as_yaml_1_2() -> None:
    resolvers = {}
    for first, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items():
        resolvers[first] = [pair for pair in patterns if pair[0] not in _NOT_YAML_1_2]
    _Yaml12Loader.yaml_implicit_resolvers = resolvers
    for tag, (pattern, firsts) in _YAML_1_2.items():
        _Yaml12Loader.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), list(firsts))


_resolve_scalars_as_yaml_1_2()

Model = TypeVar("Model", bound=BaseModel)


def load(path: Path, model: type[Model]) -> Model:
    if not path.is_file():
        names = [neighbour.stem for neighbour in yaml_files(path.parent)]
        raise GuardError("no such file", where=path, remedy=choose_from(path.stem, names))
    content = _read(path)
    if not isinstance(content, dict):
        got = "nothing" if content is None else repr(content)[:60]
        remedy = "Write one `key: value` a line, after the model of the other files there"
        raise GuardError("must be a mapping of keys to values", where=path, got=got, remedy=remedy)
    return validate(content, model, where=path)


def load_named(name: str, folder: Path, model: type[Model], key: str) -> Model:
    """The model in `<name>.yaml` of a folder of the home or the checkout. Its `key` says so too."""
    path = own_or_shipped(folder / f"{name}.yaml")
    value = load(path, model)
    stated = getattr(value, key)
    if stated != name:
        problem = f"{key} differs from the file's name"
        remedy = f"Write `{key}: {name}` or rename the file"
        raise GuardError(problem, where=path, got=stated, remedy=remedy)
    return value


def _read(path: Path) -> Any:
    try:
        return yaml.load(read_text(path), Loader=_Yaml12Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = f"not valid YAML{line}: {getattr(error, 'problem', error)}"
        remedy = "Correct the file; a text with ':' or '#' needs quotes"
        raise GuardError(problem, where=path, remedy=remedy) from error
    # For example a number of thousands of digits, or brackets nested a thousand deep.
    except (ValueError, RecursionError) as error:
        problem = f"a value cannot be read: {error}"
        remedy = "Correct it; text that looks like a number needs quotes"
        raise GuardError(problem, where=path, remedy=remedy) from error


def validate(
    content: Any, model: type[Model], *, where: object, remedy: str = CORRECT_KEYS
) -> Model:
    """`content` as one `model`. Raises GuardError that names every bad key, with the `remedy`."""
    try:
        # Via JSON, where strict pydantic accepts an array as a tuple and leaves free-form lists
        # alone.
        text = json.dumps(content, default=str)
    except (ValueError, TypeError, RecursionError) as error:
        problem = f"not a tree of keys and values: {error}"
        hint = "Write out what an alias (*name) repeats inside itself; a key is text or a number"
        raise GuardError(problem, where=where, remedy=hint) from error
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        wrong = wrong_values(error.errors(), json.loads(text))
        problems = "; ".join(_in_words(value, model) for value in wrong)
        raise GuardError(problems, where=where, remedy=remedy) from error


def _in_words(value: WrongValue, model: type[BaseModel]) -> str:
    key = value.key or "content"
    if value.kind == "extra_forbidden":
        names = _names(model, value.path[:-1])
        nearest = did_you_mean(str(value.path[-1]), names)
        return f"unknown key '{key}'. {nearest or 'Known: ' + ', '.join(names)}"
    if value.kind == "missing":
        return f"missing key '{key}'"
    words = f"'{key}': {value.problem[0].lower()}{value.problem[1:]}"
    return f"{words}, got {value.got}" if value.got else words


def _names(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            continue
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                model = inner
    return list(model.model_fields)
