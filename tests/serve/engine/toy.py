"""A backend without a model: it answers by virtual starts, and records all. Tests only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from guard.errors import GuardError
from serve.engine.backend import Backend, BackendRequest, EngineOutput, Loaded
from serve.engine.score import EngineCounters

STATE_SIZE = 4


class ToyBackend(Backend):
    """Answers one request a step; a logit is the length of its prompt."""

    context_tokens = 2048
    slots = 1
    adapted_layers: frozenset[str] = frozenset()
    block_size = 32
    step_tokens = 64
    cache_tokens = 0
    state_size = STATE_SIZE

    def __init__(self) -> None:
        self.submitted: list[BackendRequest] = []
        self.loaded: dict[int, str] = {}
        self.is_refusing = False
        self.scrubs = 0
        self._waiting: dict[str, BackendRequest] = {}

    def counters(self) -> EngineCounters:
        return EngineCounters()

    def load(self, name: str, folder: Path) -> Loaded:
        adapter_id = len(self.loaded) + 1
        self.loaded[adapter_id] = name
        return Loaded(adapter_id, "content")

    def unload(self, adapter: Loaded) -> None:
        del self.loaded[adapter.adapter_id]

    def in_slots(self) -> frozenset[int]:
        return frozenset()

    def submit(self, request: BackendRequest) -> str:
        if self.is_refusing:
            raise GuardError("refused")
        self.submitted.append(request)
        request_id = str(len(self.submitted))
        self._waiting[request_id] = request
        return request_id

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def step(self) -> list[EngineOutput]:
        request_id = min(
            self._waiting, key=lambda name: (self._waiting[name].virtual_start, int(name))
        )
        request = self._waiting.pop(request_id)
        state = None
        if request.wants_state:
            state = np.ones(STATE_SIZE, np.float32)
        length = request.tokens
        return [EngineOutput(request_id, float(length), 0, length, state)]

    def unreadable(self) -> dict[int, Exception]:
        return {}

    def forget(self) -> None:
        pass

    def scrub(self) -> None:
        self.scrubs += 1

    def close(self) -> None:
        pass
