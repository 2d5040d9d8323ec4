"""Types of options for argparse, whose errors say what is expected, and lists of names."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterable

from guard.errors import GuardError


def multiple(text: str, of: int, at_least: int, kind: str = "") -> int:
    """A whole number. Raises ArgumentTypeError, as all types here do."""
    if not text.isdecimal() or int(text) < at_least or int(text) % of:
        wanted = f"{kind or f'a multiple of {of}'} from {at_least}"
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return int(text)


def whole_number(text: str) -> int:
    return multiple(text, 1, 0, "a whole number")


def count(text: str) -> int:
    return multiple(text, 1, 1, "a whole number")


def whole_numbers(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(whole_number(part.strip()) for part in text.split(",")))


def comma_separated(text: str, kind: str) -> list[str]:
    """The names of this `kind` in a list, each once, in order. GuardError if there is none."""
    names = [name.strip() for name in text.split(",")]
    names = [name for name in dict.fromkeys(names) if name]
    if not names:
        remedy = "Name one, or several separated by commas"
        raise GuardError(f"no {kind} was named", got=repr(text), remedy=remedy)
    return names


def names_listed(names: Iterable[str], kind: str) -> tuple[str, ...]:
    """The names. Raises GuardError for a single text, whose letters Python would take for names."""
    if isinstance(names, str):
        remedy = f"Write [{names!r}] for a single one"
        raise GuardError(f"{kind} must be a list of names", got=repr(names), remedy=remedy)
    return tuple(names)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    return positive(text, "a number of seconds")


def positive(text: str, kind: str = "a number") -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be {kind} above 0, got {text!r}")
