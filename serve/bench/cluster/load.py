"""Senders without a pause, whose answers are compared with those of an undisturbed server.

Knows nothing of what happens to the server meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from guard.conversation.example import Message
from serve.bench.http.overhead import as_body
from serve.cluster.pool import REPLICA_HEADER

MARGIN = 0.02  # of p_violation around the threshold: batches of other sizes round differently


@dataclass(frozen=True)
class UndisturbedCheck:
    """A check, and an undisturbed server's answer: p_violation and threshold by rule."""

    body: dict[str, Any]
    verdict: str
    p_violation: Mapping[str, tuple[float, float]]

    @property
    def is_clear_violation(self) -> bool:
        """Whether a rule is violated and not near its threshold."""
        return any(p - threshold > MARGIN for p, threshold in self.p_violation.values())

    def is_contradicted_by(self, answer: Mapping[str, Any]) -> bool:
        """Whether the answer has other rules than the check, or another verdict by a rule that is
        not near its threshold. Rules that the answer reports as unjudged have none.
        """
        verdicts = {result["rule"]: result["verdict"] for result in answer.get("results", ())}
        unjudged = {refused["rule"] for refused in answer.get("unjudged", ())}
        if verdicts.keys() | unjudged != self.p_violation.keys():
            return True
        for rule, verdict in verdicts.items():
            p_violation, threshold = self.p_violation[rule]
            is_violated = p_violation >= threshold
            differs = (verdict == "violation") != is_violated
            if differs and abs(p_violation - threshold) > MARGIN:
                return True
        return False


class JudgedAnswer(NamedTuple):
    """When an answer arrived, by this process's clock, how long it took, and who judged."""

    at_s: float
    took_s: float
    replica: str


@dataclass
class LoadOutcomes:
    """What became of checks. Many threads may use it."""

    judged: int = 0
    unjudged: int = 0  # status 503, which says so
    lost: int = 0  # no answer at all, or one of another status
    false_allows: int = 0  # "allow", whatever its results, where a rule is clearly violated
    contradicted: int = 0
    moved: int = 0  # judged by another replica than the same conversation before
    answers: list[JudgedAnswer] = field(default_factory=list)
    _places: dict[int, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, check: UndisturbedCheck, response: httpx.Response | None, took_s: float) -> None:
        """Count a check that was answered just now."""
        with self._lock:
            self._note(check, response, took_s)

    def _note(
        self, check: UndisturbedCheck, response: httpx.Response | None, took_s: float
    ) -> None:
        if response is None or (answer := _answer(response)) is None:
            self.lost += 1
        elif response.status_code == 503:
            self.unjudged += 1
        else:
            self.judged += 1
            replica = response.headers.get(REPLICA_HEADER, "")
            self.answers.append(JudgedAnswer(time.monotonic(), took_s, replica))
            self.moved += self._places.get(id(check), replica) != replica
            self._places[id(check)] = replica
            self.contradicted += check.is_contradicted_by(answer)
            self.false_allows += answer["verdict"] == "allow" and check.is_clear_violation


def _answer(response: httpx.Response) -> dict[str, Any] | None:
    """The body of status 200, or of a 503 that says that a check was not judged; else None."""
    if response.status_code not in (200, 503):
        return None
    try:
        answer: dict[str, Any] = response.json()
    except ValueError:
        return None
    if response.status_code == 503 and answer.get("verdict") != "unjudged":
        return None
    return answer


def expected_of(
    client: httpx.Client, conversations: Sequence[Sequence[Message]], rules: Sequence[str]
) -> list[UndisturbedCheck]:
    """Ask the server for each conversation, and keep its answers."""
    undisturbed: list[UndisturbedCheck] = []
    for messages in conversations:
        body = as_body(messages, rules)
        answer = client.post("/v1/check", json=body).raise_for_status().json()
        p_violation = {}
        for result in answer["results"]:
            p_violation[result["rule"]] = (result["p_violation"], result["threshold"])
        undisturbed.append(UndisturbedCheck(body, answer["verdict"], p_violation))
    return undisturbed


@contextlib.contextmanager
def under_load(
    client: httpx.Client, checks: Sequence[UndisturbedCheck], senders: int
) -> Iterator[LoadOutcomes]:
    """While the context is open, `senders` send these checks without a pause."""
    outcomes = LoadOutcomes()
    is_over = threading.Event()

    def send(first: int) -> None:
        number = first
        # A client each: httpx may close a connection that another thread has just been given.
        with httpx.Client(base_url=client.base_url, timeout=90, trust_env=False) as sender_client:
            while not is_over.is_set():
                check = checks[number % len(checks)]
                number += senders
                response = None
                began_s = time.monotonic()
                with contextlib.suppress(httpx.HTTPError):
                    response = sender_client.post("/v1/check", json=check.body)
                outcomes.note(check, response, time.monotonic() - began_s)
                if response is not None and response.status_code == 503:
                    time.sleep(0.05)

    futures: list[Future[None]] = []
    with ThreadPoolExecutor(senders) as pool:
        try:
            futures = [pool.submit(send, first) for first in range(senders)]
            yield outcomes
        finally:
            is_over.set()
    for future in futures:
        future.result()
