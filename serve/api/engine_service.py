"""Checks by an engine of this process. Knows nothing of any format."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from fastapi import Request
from starlette.exceptions import HTTPException

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card, check_rule, read_card
from serve.api.access import Caller
from serve.api.keeping import CheckKeeper
from serve.api.observe.record import Observer
from serve.api.service import POLL_S, CheckService, not_trained
from serve.engine import Check
from serve.engine.engines import CheckEngine
from serve.engine.refusals import Overloaded, too_late
from serve.engine.thread.engine_thread import TIMEOUT_S, EngineThread
from serve.registry.rollout import Rollout, TakenBack, TrialVersion, trial_name
from serve.registry.source import RolloutSource


class EngineService(CheckService):
    """An engine, driven from a thread of its own between `start` and `close`.

    A check has `timeout_s` seconds. `cards`, by default the engine's, are kept as the rules are
    served now. The `source` says what of each rule is to be served.
    """

    def __init__(
        self,
        engine: CheckEngine,
        timeout_s: float = TIMEOUT_S,
        observers: Sequence[Observer] = (),
        cards: dict[str, Card] | None = None,
        source: RolloutSource | None = None,
        keeper: CheckKeeper | None = None,
    ) -> None:
        self._served: dict[str, Card] = dict(engine.rules) if cards is None else cards
        super().__init__(self._served, observers, source, keeper)
        self._trials: dict[str, set[str]] = {}  # what the engine has beside each rule's champion
        for rule in self._served:
            with contextlib.suppress(GuardError):  # a merged base's has no folder
                self.rollouts[rule] = Rollout(folder=engine.folder(rule))
        self._engine = engine
        self._timeout_s = timeout_s
        self.thread: EngineThread  # from `start` on
        self._changing = asyncio.Lock()  # one rule after the other

    def start(self) -> None:
        self.thread = EngineThread(self._engine, self._timeout_s, self._started_again)

    def close(self) -> None:
        """Finish the checks under way and take no more. Does not close the engine."""
        self.thread.close()
        super().close()

    def text_tokens(self, text: str) -> int:
        return self._engine.text_tokens(text)

    def _started_again(self) -> None:
        """Take over the cards of the restarted engine, which has read the weights again."""
        for name, card in self._engine.rules.items():
            if name in self._served:
                self._served[name] = card

    def wanted(self, rule: str) -> Rollout:
        found = self._source.find(rule, self._served[rule])
        return self.without_taken_back(found or self._as_now(rule))

    def _as_now(self, rule: str) -> Rollout:
        """What of the rule is served. Raises GuardError if it has no folder."""
        return self.rollouts.get(rule) or Rollout(folder=self._engine.folder(rule))

    async def watch_trials(self) -> None:
        """Nobody else judges here."""

    async def is_ready(self) -> bool:
        return self.thread.is_ready

    async def serve(
        self, rule: str, rollout: Rollout | None = None, *, as_before: bool = False
    ) -> Card:
        """As `CheckService.serve`, or as `rollout` says. A trial that cannot be served is over."""
        async with self._changing:
            if as_before:
                rollout = self._as_now(rule)
            is_given = rollout is not None
            if rollout is None:
                rollout = await asyncio.to_thread(self._source.find, rule, self._served.get(rule))
            if rollout is None and rule not in self._served:
                raise not_trained(rule, self._served)
            wanted = self.without_taken_back(rollout or self._as_now(rule))
            card = await asyncio.to_thread(read_card, wanted.folder)
            check_rule(card, rule, wanted.folder)
            before = self.rollouts.get(rule)
            is_same = before is not None and before.folder == wanted.folder
            is_asked_again = not is_given and before == wanted
            try:
                await self._load_trial(rule, wanted.trial)
                if is_asked_again or not is_same or card != self._served.get(rule):
                    await asyncio.wrap_future(self.thread.serve_rule(rule, wanted.folder))
                self._served[rule] = self._engine.rules[rule]
                self.rollouts[rule] = self.without_taken_back(wanted)
            finally:
                await self._unload_trials(rule)
            return self._served[rule]

    async def _load_trial(self, rule: str, trial: TrialVersion | None) -> None:
        """Have the engine serve this version beside the rule's champion."""
        loaded = self._trials.setdefault(rule, set())
        name = "" if trial is None else trial_name(rule, trial.version)
        if trial is None or name in loaded:
            return
        try:
            check_rule(await asyncio.to_thread(read_card, trial.folder), rule, trial.folder)
            await asyncio.wrap_future(self.thread.serve_rule(name, trial.folder))
            loaded.add(name)
        except GuardError as error:
            if isinstance(error, Overloaded) or not self._engine.is_usable:
                raise
            self.take_back(TakenBack(rule, trial, f"it cannot be served: {error}"))

    async def _unload_trials(self, rule: str) -> None:
        """Have the engine forget the rule's versions that are on trial no longer; those that it
        cannot forget now go with the next change.
        """
        rollout = self.rollouts.get(rule)
        kept = ""
        if rollout is not None and rollout.trial is not None:
            kept = trial_name(rule, rollout.trial.version)
        for name in self._trials[rule] - {kept}:
            with contextlib.suppress(GuardError):
                await asyncio.wrap_future(self.thread.remove_rule(name))
                self._trials[rule].discard(name)

    async def remove(self, rule: str) -> Card:
        async with self._changing:
            if len(self._served) == 1:
                raise HTTPException(409, f"{rule!r} is the last rule; stop the server instead")
            await asyncio.wrap_future(self.thread.remove_rule(rule))
            del self.rollouts[rule]
            for name in self._trials.pop(rule, ()):
                await asyncio.wrap_future(self.thread.remove_rule(name))
            return self._served.pop(rule)

    async def _answer(
        self,
        request: Request,
        messages: Sequence[Message],
        rules: Sequence[str],
        cache_salt: str | None,
        policies: Sequence[str] = (),
    ) -> Check:
        deadline: float = request.scope["deadline"]
        salt = Caller.of(request).salted(cache_salt)
        future = self.thread.check(
            messages, rules, cache_salt=salt, deadline=deadline, policies=policies
        )
        answer = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait([answer], timeout=POLL_S))[0]:
                # The engine's thread itself ends a late check, unless it is amid a batch.
                if time.monotonic() > deadline + POLL_S:
                    raise too_late()
                if await request.is_disconnected():
                    self.thread.give_up(future)
            return await answer
        finally:  # whatever ends the wait, an unfinished check is no longer needed
            self.thread.give_up(future)
            answer.cancel()
