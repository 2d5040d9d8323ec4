"""What each rule said and how long it took, as the header `Server-Timing` of W3C.

Sent where a request has the header `guard-timing`, whatever its wire format: a gateway can log it
without reading bodies. Specification: https://www.w3.org/TR/server-timing/. Knows nothing of
formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from serve.engine import Check

ASKED_BY = "guard-timing"
HEADER = "server-timing"
MAX_CHARACTERS = 6000  # of the header: proxies refuse responses with 8 KiB of them
CUT = "cut"  # the last entry where not all fit


def wants_timing(scope: Scope) -> bool:
    """Whether the request asks for the header."""
    return ASKED_BY in Headers(scope=scope)


def server_timing(checks: Iterable[Check]) -> str:
    """`RULE;dur=MILLISECONDS;desc=VERDICT` for each rule of each check, in the order given.

    A rule without a verdict is `unjudged` and has no duration.
    """
    entries: list[str] = []
    characters = 0
    for entry in _entries(checks):
        characters += len(entry) + len(", ")
        if characters > MAX_CHARACTERS:
            return _joined([*entries, CUT])
        entries.append(entry)
    return _joined(entries)


def _entries(checks: Iterable[Check]) -> Iterator[str]:
    for check in checks:
        for verdict in check.verdicts:
            word = "violation" if verdict.violates else "allow"
            yield f"{verdict.rule};dur={check.latencies_ms[verdict.rule]:.1f};desc={word}"
        for rule in check.refused:
            yield f"{rule};desc=unjudged"


def _joined(entries: Sequence[str]) -> str:
    return ", ".join(entries)
