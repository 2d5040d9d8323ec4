"""JSON that others wrote. No key stands twice in an object: readers differ in which one counts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from guard.errors import GuardError

MAX_BYTES = 2**20  # a card or an adapter's configuration has a few thousand
# One without an end goes to the text's: so none is looked at twice.
STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
# What tells in valid JSON which keys an object has: its brackets, and texts, each with its colon if
# it is a key.
_SIGN = re.compile(rf"[{{}}]|(?P<text>{STRING.pattern})(?P<colon>\s*:)?", re.DOTALL)
_DIGITS = re.compile(rf"{STRING.pattern}|\d+", re.DOTALL)


class RepeatedKey(json.JSONDecodeError):
    """A key stands twice in an object; `pos` is where it stands again."""


class _Repeated(Exception):
    """An object that has just been read has a key twice."""


def read_json(content: str | bytes) -> Any:
    """The value of a JSON text, or of bytes in UTF-8, 16 or 32. JSONDecodeError also for a repeated
    key and a number of thousands of digits; RecursionError for what is nested too deeply.
    """
    text = content if isinstance(content, str) else decoded(content)
    try:
        return json.loads(text, object_pairs_hook=_object)
    except _Repeated:
        raise _repeated_key(text) from None
    except json.JSONDecodeError as error:  # some of Python's end as the place begins that follows
        raise json.JSONDecodeError(error.msg.removesuffix(" at"), text, error.pos) from None
    except ValueError:  # Python's, whose words are for whoever runs it
        problem = "a number has too many digits"
        raise json.JSONDecodeError(problem, text, _long_number(text)) from None


def load_json(path: Path, *, remedy: str) -> Any:
    """The value in the file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            problem = f"more than {MAX_BYTES} bytes, which no file of its kind has"
            raise GuardError(problem, where=path, remedy=remedy)
        return read_json(content.decode("utf-8"))
    except OSError as error:
        raise GuardError(f"cannot be read: {error}", where=path, remedy=remedy) from error
    except (ValueError, RecursionError) as error:
        raise GuardError(f"not valid JSON: {in_words(error)}", where=path, remedy=remedy) from error


def decoded(content: bytes) -> str:
    return content.decode(json.detect_encoding(content), "surrogatepass")


def in_words(error: ValueError | RecursionError) -> str:
    """What keeps a text from being read, and where in it; of a text of one line the column."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    if "\n" in error.doc.rstrip():
        return f"{error.msg} at {place(error.doc, error.pos)}"
    return f"{error.msg} at column {error.colno}"


def place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"line {line}, column {column}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _Repeated
    return values


def _repeated_key(text: str) -> RepeatedKey:
    """The error for the first key that stands again in its object, found in one pass."""
    objects: list[set[str]] = []  # the keys of those that are open, the innermost last
    for sign in _SIGN.finditer(text):
        if sign[0] == "{":
            objects.append(set())
        elif sign[0] == "}":
            objects.pop()
        elif sign["colon"]:
            key = sign["text"][1:-1]
            if "\\" in key:  # else it stands there as it is
                key = json.loads(sign["text"])
            if key in objects[-1]:
                return RepeatedKey(f"the key {key!r} stands twice", text, sign.start())
            objects[-1].add(key)
    raise AssertionError("no key stands twice")


def _long_number(text: str) -> int:
    """Where the first number stands that has more digits than Python parses."""
    for sign in _DIGITS.finditer(text):
        if len(sign[0]) > sys.get_int_max_str_digits() and not sign[0].startswith('"'):
            return sign.start()
    return 0
