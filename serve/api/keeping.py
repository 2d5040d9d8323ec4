"""Answered checks on their way into the review store, and what people ask it. No answer of a check
waits for it, or is lost by it.

Knows nothing of who reviews them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prometheus_client import Counter

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.api.observe.record import CheckRecord
from serve.registry.database import LOCKED_S
from serve.registry.reviews import KeptCheck, KeptVerdict, ReviewStore

log = logging.getLogger(__name__)

MOST_WAITING = 64  # checks that are still to be written; of more none is kept
MOST_ASKING = 8  # requests of people that wait for the store, or are with it
EXPIRE_S = 3600.0  # without a check to write, after which what has expired is deleted

Answer = TypeVar("Answer")


class CheckKeeper:
    """Writes checks into a store from a thread of its own, and counts those that it cannot. Another
    one asks it for people: threads that all share would run out where the store is locked.
    """

    def __init__(self, store: ReviewStore, dropped: Counter) -> None:
        self.store = store
        self._dropped = dropped
        self._waiting: queue.Queue[KeptCheck | None] = queue.Queue(MOST_WAITING)
        self._has_failed = False
        self._asking = ThreadPoolExecutor(1, "reviews asked")
        self._places = threading.BoundedSemaphore(MOST_ASKING)
        self._thread = threading.Thread(target=self._keep_all, name="reviews", daemon=True)
        self._thread.start()

    def saw(self, record: CheckRecord, messages: Sequence[Message], conversation: str) -> None:
        """Keep an answered check if the policy wants it; `conversation` is its key."""
        verdicts = list(record.check.verdicts) if record.check else []
        # Of a text that is not kept nobody can say whether it was violated.
        verdicts = [verdict for verdict in verdicts if verdict.rule not in record.policies]
        is_uncertain = not all(verdict.confident for verdict in verdicts)
        is_flagged = any(verdict.violates for verdict in verdicts)
        wants = {"is_uncertain": is_uncertain, "is_flagged": is_flagged}
        if not verdicts or not self.store.policy.keeps(conversation, **wants):
            return
        kept: list[KeptVerdict] = []
        for said in verdicts:
            numbers = (said.p_violation, said.threshold, said.confident)
            kept.append(KeptVerdict(said.rule, record.version_of(said.rule), said.word, *numbers))
        request = record.request
        names = (request.request_id, request.tenant or "", conversation)
        try:
            self._waiting.put_nowait(KeptCheck(*names, tuple(messages), kept))
        except queue.Full:
            self._dropped.inc()

    async def answer(self, ask: Callable[..., Answer], *arguments: object) -> Answer:
        """What the store says, asked by this method of its. Raises GuardError where too many ask,
        and as the method does.
        """
        if not self._places.acquire(blocking=False):
            raise GuardError("too many requests wait for the review store", where=self.store.file)
        asked = self._asking.submit(ask, self.store, *arguments)
        asked.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(asked)

    def close(self) -> None:
        """Write what waits, unless that takes too long."""
        self._asking.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=LOCKED_S)
            self._thread.join(LOCKED_S)

    def _keep_all(self) -> None:
        while True:
            try:
                check = self._waiting.get(timeout=EXPIRE_S)
            except queue.Empty:
                self._succeeds(self.store.expire)
                continue
            if check is None:
                return
            if not self._succeeds(functools.partial(self.store.keep, check)):
                self._dropped.inc()

    def _succeeds(self, change: Callable[[], None]) -> bool:
        """Whether the store could be changed; the log says the first time why not."""
        try:
            change()
        except Exception as error:  # whatever it is, checks are answered
            if not self._has_failed:
                why = error if isinstance(error, GuardError) else type(error).__name__
                log.error("checks are not kept for review: %s", why)
            self._has_failed = True
            return False
        self._has_failed = False
        return True
