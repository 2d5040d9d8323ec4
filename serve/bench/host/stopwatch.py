"""Time inside named functions, each without the others nested in it. Knows nothing of engines."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class Stopwatch:
    """Seconds by cause. In nested functions, each moment counts for the innermost one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._causes: list[str] = []
        self._since = 0.0

    def timed(self, cause: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A wrapper of the function, whose time counts for `cause`."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._causes.append(cause)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._causes.pop()

        return run

    def _switch(self) -> None:
        """Add the time since the last switch to the cause that has been running."""
        now = time.perf_counter()
        if self._causes:
            self.seconds[self._causes[-1]] += now - self._since
        self._since = now

    @contextlib.contextmanager
    def watching(self, functions: Mapping[str, Sequence[str]]) -> Iterator[None]:
        """Time `functions` (`module:Class.function`, by cause), and restore them afterwards.

        Raises AttributeError or KeyError for one that does not exist.
        """
        with contextlib.ExitStack() as undo:
            for cause, targets in functions.items():
                for target in targets:
                    module_name, _, path = target.partition(":")
                    class_name, name = path.split(".")
                    holder = getattr(importlib.import_module(module_name), class_name)
                    function = vars(holder)[name]
                    setattr(holder, name, self.timed(cause, function))
                    undo.callback(setattr, holder, name, function)
            yield
