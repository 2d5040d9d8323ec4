"""Checks by an engine of this process. Knows nothing of any format."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from fastapi import Request
from starlette.exceptions import HTTPException

from guard.conversation.example import Message
from guard.weights.card import Card, check_rule, read_card
from serve.api.access import Caller
from serve.api.observe.record import Observer
from serve.api.service import POLL_S, CheckService, FindTrained, not_trained
from serve.engine import Check
from serve.engine.engines import CheckEngine
from serve.engine.refusals import too_late
from serve.engine.thread.engine_thread import TIMEOUT_S, EngineThread


class EngineService(CheckService):
    """An engine, driven from a thread of its own between `start` and `close`.

    A check has `timeout_s` seconds. `cards`, by default the engine's, are kept as the rules are
    served now. `find_trained` finds the folder of a rule's weights as they are to be served.
    """

    def __init__(
        self,
        engine: CheckEngine,
        timeout_s: float = TIMEOUT_S,
        observers: Sequence[Observer] = (),
        cards: dict[str, Card] | None = None,
        find_trained: FindTrained = lambda rule, served: None,
    ) -> None:
        self._served: dict[str, Card] = dict(engine.rules) if cards is None else cards
        super().__init__(self._served, observers)
        self._engine = engine
        self._timeout_s = timeout_s
        self._find_trained = find_trained
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
        self._served.update(self._engine.rules)

    def folder(self, rule: str) -> Path:
        return self._find_trained(rule, self._served[rule]) or self._engine.folder(rule)

    async def serve(self, rule: str, folder: Path | None = None) -> Card:
        """As `CheckService.serve`, or by the weights in `folder`."""
        async with self._changing:
            if folder is None:
                folder = await asyncio.to_thread(self._find_trained, rule, self._served.get(rule))
                if folder is None and rule not in self._served:
                    raise not_trained(rule, self._served)
            weights_folder = folder or self._engine.folder(rule)
            card = await asyncio.to_thread(read_card, weights_folder)
            check_rule(card, rule, weights_folder)
            await asyncio.wrap_future(self.thread.serve_rule(rule, folder))
            self._served[rule] = self._engine.rules[rule]
            return self._served[rule]

    async def remove(self, rule: str) -> Card:
        async with self._changing:
            if len(self._served) == 1:
                raise HTTPException(409, f"{rule!r} is the last rule; stop the server instead")
            await asyncio.wrap_future(self.thread.remove_rule(rule))
            return self._served.pop(rule)

    async def _answer(
        self,
        request: Request,
        messages: Sequence[Message],
        rules: Sequence[str],
        cache_salt: str | None,
    ) -> Check:
        deadline: float = request.scope["deadline"]
        salt = Caller.of(request).salted(cache_salt)
        future = self.thread.check(messages, rules, cache_salt=salt, deadline=deadline)
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
