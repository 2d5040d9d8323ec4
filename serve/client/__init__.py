"""A client of the guardrail server, synchronous and asynchronous, on httpx alone.

    with GuardClient("http://127.0.0.1:8000") as guard:
        answer = guard.check(messages, ["medical_advice"])
        for text in guard.guarded_stream(messages, pieces_of_the_reply): ...

`pip install ./serve/client` installs it by itself, as `centurion_client`.
"""

from .answers import CheckAnswer, CheckFailed, NotAllowed, RuleAnswer, RuleExplanation, RuleUnjudged
from .asynchronous import AsyncGuardClient
from .synchronous import GuardClient

__all__ = [
    "AsyncGuardClient",
    "CheckAnswer",
    "CheckFailed",
    "GuardClient",
    "NotAllowed",
    "RuleAnswer",
    "RuleExplanation",
    "RuleUnjudged",
]
