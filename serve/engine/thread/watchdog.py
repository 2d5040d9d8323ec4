"""Whether an engine hangs: in a batch, or in what it loads. Knows nothing of checks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

# Seconds beyond a check's timeout after which a hanging batch is no longer waited for.
HANGS_FOR_GOOD_S = 30.0
# Seconds that a try to start an engine, or a rule's new weights, may take: large ones are read for
# minutes.
LOADING_S = 900.0


class Watchdog:
    """Times what the engine's thread does, for any other thread. A check may take `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # By time.monotonic, while it lasts.
        self._batch_since: float | None = None
        self._loading_since: float | None = None

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """A context in which the engine computes."""
        self._batch_since = time.monotonic()
        try:
            yield
        finally:
            self._batch_since = None

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A context in which an engine is started, or a rule's weights are read."""
        self._loading_since = time.monotonic()
        try:
            yield
        finally:
            self._loading_since = None

    def load_next(self) -> None:
        """Note that in `loading` something else is loaded from now on, with a time of its own."""
        self._loading_since = time.monotonic()

    @property
    def batch_is_late(self) -> bool:
        return _lasts_longer(self._batch_since, self._timeout_s)

    @property
    def loading_is_late(self) -> bool:
        return _lasts_longer(self._loading_since, self._timeout_s)

    @property
    def hanging(self) -> str | None:
        """What has taken so long that nobody should wait on; None if nothing has."""
        if _lasts_longer(self._loading_since, LOADING_S):
            return "what the engine loads"
        if _lasts_longer(self._batch_since, self._timeout_s + HANGS_FOR_GOOD_S):
            return "a batch of the engine"
        return None


def _lasts_longer(since: float | None, seconds: float) -> bool:
    return since is not None and time.monotonic() > since + seconds
