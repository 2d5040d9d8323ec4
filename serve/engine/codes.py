"""Why there is no verdict, in one word that machines read: a closed list. The sentence beside a
code is for people and may change; a code may not. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal, get_args

Code = Literal[
    "too_late",
    "overloaded",
    "caller_gone",
    "too_long",
    "unread_content",
    "unseen_language",
    "nothing_said",
    "unknown_conversation",
    "metadata_missing",
    "not_served",
    "weights_unavailable",
    "nan",
    "engine_failed",
    "request_refused",
]
CODES: tuple[Code, ...] = get_args(Code)
# HTTP statuses that say more than that the request was refused.
STATUS_CODES: Mapping[int, Code] = {
    408: "too_late",
    413: "too_long",
    429: "overloaded",
    500: "engine_failed",
    503: "overloaded",
}


def code_of(error: BaseException) -> Code:
    """The code of what was raised in place of a verdict: its own, or that of its HTTP status."""
    if isinstance(error, asyncio.CancelledError):
        return "caller_gone"
    for code in CODES:
        if getattr(error, "code", None) == code:
            return code
    return code_of_status(getattr(error, "status_code", 500))


def code_of_status(status: int) -> Code:
    """The code of a response with this HTTP status that no check has led to."""
    return STATUS_CODES.get(status, "request_refused")
