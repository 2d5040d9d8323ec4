"""The checks that are in the engine, and who waits for each. Knows nothing of threads."""

from __future__ import annotations

from serve.engine.engines import CheckEngine, OpenedCheck
from serve.engine.refusals import engine_failure
from serve.engine.thread.pending import PendingCheck


class OpenChecks:
    """Opens checks in an engine and gives each answer, or why there is none, to its caller.

    Used by one thread; its length may be read by any.
    """

    def __init__(self, engine: CheckEngine) -> None:
        self._engine = engine
        self._open: list[tuple[OpenedCheck, PendingCheck]] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_work_left(self) -> bool:
        """Whether any check still has something to compute."""
        return any(not check.call.done for check, _ in self._open)

    def open(self, pending: PendingCheck) -> None:
        """Put a check into the engine; one that cannot be opened is answered with why."""
        try:
            if failure := pending.failure():
                raise failure
            check = self._engine.open_check(
                pending.messages, pending.rules, cache_salt=pending.cache_salt
            )
        except BaseException as error:  # to the caller, who is on another thread
            pending.fail(error)
        else:
            self._open.append((check, pending))

    def drop(self) -> None:
        """End the checks that nobody waits for any longer, or that are too late."""
        still_open = []
        given_up = []
        for check, pending in self._open:
            failure = pending.failure()
            if failure is None:
                still_open.append((check, pending))
            else:
                given_up.append((check, pending, failure))
        # First: if the engine fails, nobody is told twice.
        self._open = still_open
        for _, pending, failure in given_up:
            pending.fail(failure)
        for check, _, _ in given_up:
            self._engine.cancel(check.call)

    def settle(self) -> int:
        """Give the finished checks to their callers; the number of them."""
        done = [(check, pending) for check, pending in self._open if check.call.done]
        self._open = [(check, pending) for check, pending in self._open if not check.call.done]
        for check, pending in done:
            try:
                if failure := pending.failure():  # its batch took too long
                    raise failure
                pending.future.set_result(check.result())
            except Exception as error:
                pending.fail(error)
        return len(done)

    def fail_batch(self, error: Exception) -> None:
        """Give `error` to all callers, and clear the engine for the next batch."""
        failed = self._open
        self.fail(engine_failure(error))  # once: it is logged
        for check, _ in failed:
            self._engine.cancel(check.call)

    def fail(self, error: Exception) -> None:
        """Give `error` to all callers; the engine, which may be dead, is asked nothing."""
        failed, self._open = self._open, []
        for _, pending in failed:
            pending.fail(error)
