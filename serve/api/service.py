"""The engine as every wire format sees it: checks, and what their verdicts mean together.

Knows nothing of any format.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fastapi import Request
from starlette.exceptions import HTTPException

from guard.card import Card
from guard.example import Message
from serve.api.access import Caller
from serve.api.catalogue import Catalogue
from serve.api.errors import Unjudged
from serve.api.limits import TEXTS_AT_ONCE
from serve.api.observe.record import CheckRecord, Observer, failure_of
from serve.api.observe.timing import wants_timing
from serve.engine import Check, Refusal
from serve.engine.mixed import CheckEngine
from serve.engine.thread import TIMEOUT_S, EngineThread, too_late
from serve.policy.logic import Decision
from serve.policy.rule_set import RuleSet
from serve.policy.ruling import Ruling

log = logging.getLogger(__name__)

PATH = "/"  # in every reason that names a file, and in no other
FindTrained = Callable[[str], Path | None]
POLL_S = 0.5  # how often a check looks whether its caller is still connected


class DecidedCheck(NamedTuple):
    """The verdicts of a check, and what they mean together."""

    check: Check
    decision: Decision

    @property
    def rulings(self) -> dict[str, Ruling]:
        """What is known of each rule."""
        return rulings_of(self.check)


class CheckService:
    """An engine, driven from a thread of its own between `start` and `close`.

    A check has `timeout_s` seconds. The observers are told of each when it is over. `cards`, by
    default the engine's, are kept as the rules are served now. `find_trained` finds the folder of a
    rule that is trained and not served.
    """

    def __init__(
        self,
        engine: CheckEngine,
        timeout_s: float = TIMEOUT_S,
        observers: Sequence[Observer] = (),
        cards: dict[str, Card] | None = None,
        find_trained: FindTrained = lambda rule: None,
    ) -> None:
        self.cards: dict[str, Card] = dict(engine.rules) if cards is None else cards
        self._engine = engine
        self._timeout_s = timeout_s
        self._observers = tuple(observers)
        self._find_trained = find_trained
        self._thread: EngineThread
        self._changing = asyncio.Lock()  # one rule after the other

    @classmethod
    def of(cls, request: Request) -> CheckService:
        """The service of the app that handles `request`."""
        service: CheckService = request.app.state.service
        return service

    @property
    def thread(self) -> EngineThread:
        """The engine's thread, while the service runs."""
        return self._thread

    def start(self) -> None:
        """Take checks."""
        self._thread = EngineThread(self._engine, self._timeout_s, self._started_again)

    def close(self) -> None:
        """Finish the checks under way and take no more. Does not close the engine."""
        self._thread.close()
        for observer in self._observers:
            observer.close()

    def text_tokens(self, text: str) -> int:
        """How many tokens the engine makes of a text by itself."""
        return self._engine.text_tokens(text)

    def _started_again(self) -> None:
        """A rule that was trained again before the engine was is served by its new weights."""
        self.cards.update(self._engine.rules)

    def folder(self, rule: str) -> Path:
        """Where a rule's weights are. Raises GuardError if it has no folder."""
        return self._engine.folder(rule)

    async def serve(self, rule: str, folder: Path | None = None) -> Card:
        """Serve a rule by the weights in `folder`, by default as they are in its own now; its card.

        Checks that are under way end as they began. Raises HTTPException 404 for a rule that is
        neither served nor trained, and GuardError if its weights cannot be served; what is served
        is then as before.
        """
        async with self._changing:
            if folder is None and rule not in self.cards:
                folder = await asyncio.to_thread(self._find_trained, rule)
                if folder is None:
                    raise HTTPException(404, f"the rule {rule!r} is neither served nor trained")
            await asyncio.wrap_future(self._thread.serve(rule, folder))
            self.cards[rule] = self._engine.rules[rule]
            return self.cards[rule]

    async def remove(self, rule: str) -> Card:
        """Stop serving a rule; the card that it had. Checks that are under way end with it.

        Raises HTTPException 409 for the last one, and GuardError for what the engine refuses.
        """
        async with self._changing:
            if len(self.cards) == 1:
                raise HTTPException(409, f"{rule!r} is the last rule; stop the server instead")
            await asyncio.wrap_future(self._thread.remove(rule))
            return self.cards.pop(rule)

    async def check(
        self,
        request: Request,
        messages: Sequence[Message],
        rule_set: RuleSet,
        *,
        metadata: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
    ) -> DecidedCheck:
        """Put a conversation to `rule_set`, as long as the sender of `request` waits.

        `metadata` are what the set's conditions read. Raises HTTPException 413 for more characters
        than the caller may send, and GuardError if there is no verdict at all: too much work, too
        late, a failed batch.
        """
        caller = Caller.of(request)
        caller.check_size([messages])
        async with caller.room:
            began_s, clock = time.time(), time.perf_counter()
            cards = _served(caller.catalogue, rule_set)
            try:
                salt = caller.salted(cache_salt)
                check = await self._answer(request, messages, rule_set.rules, salt)
            except BaseException as error:
                record = self._record(request, rule_set, cards, began_s, clock)
                self._tell(replace(record, failure=failure_of(error)))
                raise
        if wants_timing(request.scope):
            request.scope["checks"].append(check)
        decision = rule_set.decide(rulings_of(check), metadata or {})
        record = self._record(request, rule_set, cards, began_s, clock)
        self._tell(replace(record, check=check, decision=decision))
        return DecidedCheck(check, decision)

    def _record(
        self,
        request: Request,
        rule_set: RuleSet,
        cards: Mapping[str, Card],
        began_s: float,
        clock: float,
    ) -> CheckRecord:
        """What is known of a check whatever came of it; `clock` is by time.perf_counter."""
        caller = Caller.of(request)
        tenant = caller.tenant.name if caller.tenant else None
        facts = replace(request.scope["facts"], tenant=tenant)
        return CheckRecord(facts, rule_set, cards, began_s, time.perf_counter() - clock)

    def _tell(self, record: CheckRecord) -> None:
        for observer in self._observers:
            observer.checked(record)

    async def _answer(
        self,
        request: Request,
        messages: Sequence[Message],
        rules: Sequence[str],
        cache_salt: str | None,
    ) -> Check:
        """The engine's answer. Raises as `check`."""
        deadline: float = request.scope["deadline"]
        future = self._thread.check(messages, rules, cache_salt=cache_salt, deadline=deadline)
        answer = asyncio.wrap_future(future)
        try:
            while not await _is_done(answer):
                # The engine's thread itself ends a late check, unless it is amid a batch.
                if time.monotonic() > deadline + POLL_S:
                    raise too_late()
                if await request.is_disconnected():
                    self._thread.give_up(future)
            return _without_internals(await answer)
        finally:  # whatever ends the wait, nobody needs what is not done by then
            self._thread.give_up(future)
            answer.cancel()

    async def check_each(
        self,
        request: Request,
        conversations: Sequence[Sequence[Message]],
        rule_set: RuleSet,
        *,
        metadata: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
    ) -> list[DecidedCheck]:
        """A check for each conversation, TEXTS_AT_ONCE at a time. Raises as `check`."""
        Caller.of(request).check_size(conversations)
        room = asyncio.Semaphore(TEXTS_AT_ONCE)

        async def check_one(messages: Sequence[Message]) -> DecidedCheck:
            async with room:
                return await self.check(
                    request, messages, rule_set, metadata=metadata, cache_salt=cache_salt
                )

        tasks = [asyncio.ensure_future(check_one(messages)) for messages in conversations]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def judge_each(
        self,
        request: Request,
        conversations: Sequence[Sequence[Message]],
        rule_set: RuleSet,
        *,
        metadata: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
    ) -> list[DecidedCheck]:
        """`check_each`, where every rule has a verdict. Raises Unjudged if one has none."""
        checks = await self.check_each(
            request, conversations, rule_set, metadata=metadata, cache_salt=cache_salt
        )
        for check, decision in checks:
            if check.refused or decision.ruling is Ruling.UNJUDGED:
                raise unjudged(check, decision)
        return checks


def violated(checks: Sequence[DecidedCheck]) -> list[str]:
    """The rules by which any check is a violation.

    Raises Unjudged if none is one, and one is unjudged.
    """
    rules: dict[str, None] = {}
    for decided in checks:
        if decided.decision.ruling is Ruling.VIOLATION:
            rules |= dict.fromkeys(_violated_in(decided))
    for check, decision in checks:
        if decision.ruling is Ruling.UNJUDGED and not rules:
            raise unjudged(check, decision)
    return list(rules)


def _violated_in(decided: DecidedCheck) -> Sequence[str]:
    """The violated rules that a violation rests on; where it rests on none, whatever it does."""
    check, decision = decided
    violated_rules = [verdict.rule for verdict in check.verdicts if verdict.violates]
    decisive = [rule for rule in violated_rules if rule in decision.decided_by]
    return decisive or decision.decided_by


def unjudged(check: Check, decision: Decision) -> Unjudged:
    """How many rules of the check have no verdict, and why the first of them has none.

    Where all have one, the metadata that are missing.
    """
    for rule, refusal in check.refused.items():
        rules = len(check.verdicts) + len(check.refused)
        return Unjudged(f"{len(check.refused)} of {rules} rules; {rule}: {refusal.why}")
    return Unjudged(f"the request does not state {', '.join(decision.decided_by)}")


def _served(catalogue: Catalogue, rule_set: RuleSet) -> dict[str, Card]:
    """The cards of the set's rules, without those that are removed by now."""
    return {rule: catalogue.rules[rule] for rule in rule_set.rules if rule in catalogue.rules}


def _without_internals(check: Check) -> Check:
    """The check, whose reasons tell a caller of the conversation and not of this machine."""
    refused = {}
    for rule, refusal in check.refused.items():
        refused[rule] = refusal
        if PATH in refusal.why:
            log.error("the rule %s could not be judged: %s", rule, refusal)
            why = "what answers it cannot be used now; the server's log says why"
            refused[rule] = Refusal(refusal.subject, why)
    return replace(check, refused=refused)


def rulings_of(check: Check) -> dict[str, Ruling]:
    """What is known of each rule; of one without a verdict, nothing."""
    rulings = dict.fromkeys(check.refused, Ruling.UNJUDGED)
    for verdict in check.verdicts:
        ruling = Ruling.VIOLATION if verdict.violates else Ruling.ALLOW
        rulings[verdict.rule] = ruling
    return rulings


async def _is_done(answer: asyncio.Future[Check]) -> bool:
    """Wait for the answer, POLL_S at most; whether it is there."""
    done, _ = await asyncio.wait([answer], timeout=POLL_S)
    return bool(done)
