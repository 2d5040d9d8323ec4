"""Open-loop load over HTTP: checks are sent when they are due, whatever became of earlier ones.

Knows nothing of the server but `/v1/check`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from serve.bench.report import percentile

PATIENCE_S = 30.0  # beyond a check's deadline


@dataclass(frozen=True)
class SentCheck:
    """What became of a check.

    `latency_s`: the time from when it was due to the whole answer. `waited_s`: the time from when
    it was sent, which is later if the client is busy.
    """

    status: int  # 0: no answer at all
    latency_s: float
    waited_s: float


@dataclass(frozen=True)
class HttpRun:
    """A run of traffic, and the time that it took until the last answer."""

    sent: tuple[SentCheck, ...]
    wall_s: float

    @property
    def answered_s(self) -> list[float]:
        """The latencies of the checks that have verdicts, in seconds."""
        return [check.latency_s for check in self.sent if check.status == 200]

    def percentile_ms(self, percent: float) -> float | None:
        """A percentile of the latencies of checks that have verdicts; None where none has."""
        if not self.answered_s:
            return None
        return 1000 * percentile(self.answered_s, percent)

    def count(self, status: int) -> int:
        """The number of checks with this HTTP status."""
        return sum(check.status == status for check in self.sent)

    def late(self, deadline_s: float) -> int:
        """The number of checks that got verdicts after their deadline, which counts from when they
        were sent.
        """
        return sum(check.status == 200 and check.waited_s > deadline_s for check in self.sent)


def send(
    address: str,
    bodies: Sequence[dict[str, Any]],
    due_s: Sequence[float],
    deadline_s: float,
    answered: Callable[[], object],
    at_once: int | None = None,
) -> HttpRun:
    """Send each body when it is due, in seconds from the start, with `deadline_s` to answer it.

    `answered` is called at each answer. With `at_once` no more than so many checks are under way:
    the next one is sent when one of them is answered.
    """
    return asyncio.run(_send(address, bodies, due_s, deadline_s, answered, at_once))


async def _send(
    address: str,
    bodies: Sequence[dict[str, Any]],
    due_s: Sequence[float],
    deadline_s: float,
    answered: Callable[[], object],
    at_once: int | None,
) -> HttpRun:
    places = asyncio.Semaphore(at_once or len(bodies))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    headers = {"guard-timeout-ms": str(round(1000 * deadline_s))}
    async with httpx.AsyncClient(
        base_url=address,
        limits=limits,
        headers=headers,
        timeout=deadline_s + PATIENCE_S,
        trust_env=False,
    ) as client:
        started = time.perf_counter()

        async def check(body: dict[str, Any], due: float) -> SentCheck:
            await asyncio.sleep(started + due - time.perf_counter())
            async with places:
                began = time.perf_counter()
                try:
                    status = (await client.post("/v1/check", json=body)).status_code
                except httpx.TransportError:
                    status = 0
                answered()
                ended = time.perf_counter()
            return SentCheck(status, ended - started - due, ended - began)

        pairs = zip(bodies, due_s, strict=True)
        sent = await asyncio.gather(*[check(body, due) for body, due in pairs])
        return HttpRun(tuple(sent), time.perf_counter() - started)
