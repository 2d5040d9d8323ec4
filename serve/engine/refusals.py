"""Why a check is not answered: too much work, too late, nobody waits, a failed engine."""

from __future__ import annotations

import logging

from guard.errors import GuardError
from serve.engine.codes import Code

log = logging.getLogger(__name__)


class Overloaded(GuardError):
    """The engine has more work than it can do soon, or is shutting down, or has stopped. There may
    be room again after `retry_after_s` seconds.
    """

    code: Code = "overloaded"
    retry_after_s = 1.0


class TooLate(Overloaded):
    """A check was not answered in time."""

    code: Code = "too_late"


class CallerGone(GuardError):
    """Nobody waits for the check any longer."""

    code: Code = "caller_gone"


class NotServed(GuardError):
    """A rule is served no longer, or never was."""

    code: Code = "not_served"


def not_served(rule: str) -> NotServed:
    """The error of a request for the weights of a rule that no folder serves."""
    remedy = "Name a rule that is served, or train it with `make train` and serve it"
    return NotServed("the rule is served from no folder", got=rule, remedy=remedy)


def too_late() -> TooLate:
    """The refusal of a check that was not answered in time."""
    return TooLate(
        "the check took too long",
        remedy="Try again later, or give it more time: the caller's own, or TIMEOUT= of `make up`",
    )


def engine_failure(error: BaseException) -> GuardError:
    """`error` as callers see it: one that is not a GuardError is logged, as the engine's fault."""
    if isinstance(error, GuardError):
        return error
    log.exception("a check failed")
    failure = GuardError(f"the engine failed: {error}", remedy="See the server's log")
    failure.__cause__ = error
    return failure


def without_frames(failure: GuardError) -> GuardError:
    """`failure` without the frames that it and its causes went through: they hold the engine."""
    chain: list[BaseException] = [failure]
    for error in chain:
        error.__traceback__ = None
        for linked in (error.__cause__, error.__context__):
            if linked is not None and linked not in chain:
                chain.append(linked)
    return failure
