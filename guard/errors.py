"""The one error type users see. Knows nothing of where it is printed."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterable


class GuardError(Exception):
    """Something the user can fix: what is wrong, where, what was found there, and what to do about it."""

    def __init__(
        self, what: str, *, where: object = None, got: object = None, remedy: str | None = None
    ) -> None:
        self.what, self.where, self.got, self.remedy = what, where, got, remedy
        head = f"{where}: {what}" if where is not None else what
        found = f" (got {got})" if got is not None else ""
        super().__init__(head + found + (f". {remedy}" if remedy else ""))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest of the `known` names; nothing where none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean '{nearest[0]}'?" if nearest else ""


def exits_cleanly(main: Callable[[], None]) -> Callable[[], None]:
    """Wrap a command's `main`: a GuardError becomes one line on stderr and exit status 2, never a traceback."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except GuardError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            print(
                "interrupted; give the same command again (without FORCE): what was finished is kept",
                file=sys.stderr,
            )
            sys.exit(130)

    return run
