"""A replica: the app of `serve/api` around an engine of its own, asked without a socket.

Formats, keys, limits and error bodies are those of one server. Knows nothing of Ray and of other
replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from serve.api.engine_service import EngineService
from serve.api.errors import engine_failure, retry_after_s
from serve.api.observe.metrics import Metrics
from serve.cluster.messages import (
    REPLICA_HEADER,
    RelayedCheck,
    RelayedRequest,
    RelayedResponse,
    ReplicaAnswer,
    answer_in_process,
)
from serve.cluster.note import Served, ServedNote, version_card, version_of
from serve.engine.codes import code_of
from serve.registry.rollout import Rollout

log = logging.getLogger(__name__)


class ServedApp(NamedTuple):
    """The app of a replica, and what gives its engine's memory back."""

    app: FastAPI
    close: Callable[[], None]


# Starts an engine that serves rules from these folders, by name, and the app around it.
StartApp = Callable[[Mapping[str, Path]], ServedApp]

CHANGING = Rollout(folder=Path("changing"))  # of a rule that is being changed: no version's


class GuardReplica:
    """Answers requests between `start` and `close`, by the rules that the note says are served.

    For one event loop.
    """

    def __init__(self, name: str, start_app: StartApp, note: ServedNote) -> None:
        self._name = name
        self._start_app = start_app
        self._noted = note
        self._served: Served = {}
        self._changing = asyncio.Lock()
        self._failure: GuardError | None = None
        self._until_closed = contextlib.AsyncExitStack()
        self._app: FastAPI

    @property
    def version(self) -> str:
        """The version of the rules that answer now; none that anyone names while one changes."""
        return version_of(self._served)

    @property
    def service(self) -> EngineService:
        service: EngineService = self._app.state.service
        return service

    async def start(self) -> None:
        """Load what is served, and take checks. Raises GuardError if that cannot be loaded."""
        self._served = self._noted.read()
        champions = {rule: rollout.folder for rule, rollout in self._served.items()}
        for rule, folder in champions.items():
            await asyncio.to_thread(version_card, rule, folder)
        async with contextlib.AsyncExitStack() as on_failure:
            self._app, close = await asyncio.to_thread(self._start_app, champions)
            on_failure.callback(close)
            await on_failure.enter_async_context(self._app.router.lifespan_context(self._app))
            for rule, rollout in self._served.items():
                if rollout.is_on_trial:
                    await self.service.serve(rule, rollout)
            self._until_closed = on_failure.pop_all()

    async def close(self) -> None:
        await self._until_closed.aclose()

    async def ask(self, relayed: RelayedRequest, version: str) -> RelayedResponse:
        """The app's response, by the rules of this version.

        Raises GuardError if this replica cannot serve that version; it is then replaced.
        """
        if self.version != version:
            await asyncio.shield(self._catch_up(version))
        answered = await answer_in_process(self._app, relayed)
        header = (REPLICA_HEADER.encode(), self._name.encode())
        return RelayedResponse(answered.status, (*answered.headers, header), answered.body)

    async def check(self, relayed: RelayedCheck, version: str) -> ReplicaAnswer:
        """The engine's Check, by the rules of this version; or why it gives none. Raises as `ask`.

        No observer is told of it, and nobody's key or limit is looked at: whoever asks does that.
        """
        if self.version != version:
            await asyncio.shield(self._catch_up(version))
        thread = self.service.thread
        deadline = time.monotonic() + relayed.within_s
        try:
            future = thread.check(
                relayed.messages,
                relayed.rules,
                cache_salt=relayed.cache_salt,
                deadline=deadline,
                policies=relayed.policies,
            )
            try:
                return ReplicaAnswer(self._name, await asyncio.wrap_future(future))
            finally:  # whoever asked may have gone
                thread.give_up(future)
        except GuardError as error:
            return ReplicaAnswer(
                self._name,
                error=engine_failure(error),
                code=code_of(error),
                retry_after_s=retry_after_s(error),
            )

    async def switch(self, rule: str, rollout: Rollout | None) -> ReplicaAnswer:
        """Serve a rule as this says, or without it no longer. If that is refused, the answer
        says why, and all is served as before.
        """
        async with self._changing:
            try:
                await self._set(rule, rollout)
            except GuardError as error:
                log.error("the rule %s is served as before: %s", rule, error)
                return ReplicaAnswer(self._name, error=str(error))
            except HTTPException as error:
                return ReplicaAnswer(self._name, error=error.detail)
            return ReplicaAnswer(self._name)

    async def taken_back(self) -> ReplicaAnswer:
        """The trials that this replica has taken back."""
        return ReplicaAnswer(self._name, list(self.service.taken_back.values()))

    async def metrics(self) -> ReplicaAnswer:
        counts: Metrics = self._app.state.metrics
        content, _ = counts.exposition("")
        return ReplicaAnswer(self._name, content.decode())

    async def counted(self) -> ReplicaAnswer:
        return ReplicaAnswer(self._name, self.service.traffic.counted())

    async def ready(self) -> ReplicaAnswer:
        return ReplicaAnswer(self._name, self.service.thread.is_ready)

    def check_health(self) -> None:
        """Raise GuardError once the replica answers no more checks."""
        failure = self._failure or self.service.thread.failure
        if failure is not None:
            raise failure

    async def _catch_up(self, version: str) -> None:
        """Serve what the note says is served: rules changed while this replica started.

        To its end, also if the check that began it is cancelled: others need it too.
        """
        async with self._changing:
            if self.version == version:
                return
            try:
                noted = self._noted.read()
                for rule, rollout in noted.items():
                    await self._set(rule, rollout)
                for rule in set(self._served) - set(noted):
                    await self._set(rule, None)
                if self.version != version:
                    problem = "this replica's rules do not match the requested version"
                    got = f"{self.version[:12]}, not {version[:12]}"
                    raise GuardError(problem, got=got, remedy="Retry in a few seconds")
            except (GuardError, HTTPException) as error:
                problem = f"the replica {self._name} cannot serve what the others serve: {error}"
                self._failure = GuardError(problem, remedy="The replica is started again")
                log.error("%s", self._failure)
                raise self._failure from error

    async def _set(self, rule: str, rollout: Rollout | None) -> None:
        before = self._served.get(rule)
        if before == rollout:
            return
        # A check that comes now would be answered behind the change, by the new weights: no version
        # is served until it is over, nor after one that was cancelled, wherever that had come to.
        self._served[rule] = CHANGING
        try:
            if rollout is None:
                await self.service.remove(rule)
            else:
                await asyncio.to_thread(version_card, rule, rollout.folder)
                await self.service.serve(rule, rollout)
        except (GuardError, HTTPException):  # the rule is served as before
            self._note(rule, before)
            raise
        self._note(rule, rollout)

    def _note(self, rule: str, rollout: Rollout | None) -> None:
        del self._served[rule]
        if rollout is not None:
            self._served[rule] = rollout
