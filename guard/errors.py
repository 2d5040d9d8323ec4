"""The one error type users see."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterable


class GuardError(Exception):
    """Something the user can fix: what is wrong, where, the value found there, and what to do."""

    def __init__(
        self, problem: str, *, where: object = None, got: object = None, remedy: str | None = None
    ) -> None:
        self.problem = problem
        self.where = where
        self.got = got
        self.remedy = remedy
        line = problem
        if where is not None:
            line = f"{where}: {problem}"
        if got is not None:
            line += f" (got {got})"
        if remedy:
            line += f". {remedy}"
        super().__init__(line)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question that names the nearest of the valid `names`; empty where none is near."""
    for nearest in difflib.get_close_matches(name, list(names), n=1):
        return f"Did you mean '{nearest}'?"
    return ""


def choose_from(name: str, names: Iterable[str]) -> str:
    """A remedy for an unknown `name`: the nearest of the valid `names`, if any is near, and all."""
    valid = list(names)
    listing = f"Known: {', '.join(valid) or 'none'}"
    return f"{did_you_mean(name, valid)} {listing}".lstrip()


def exits_cleanly(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a command's `main`: a GuardError is one line on stderr and exit status 2."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except GuardError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            again = "give the same command again (without FORCE): what was finished is kept"
            print(f"interrupted; {again}", file=sys.stderr)
            sys.exit(130)

    return run
