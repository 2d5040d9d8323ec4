"""vLLM with an encoder: a conversation's windows in, states out. A request becomes one request to
vLLM for each of its windows (`guard/prompt/encoder.py`), all under its adapter. Nothing is cached:
every adapter reads every window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from guard.errors import GuardError
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.windows import Window
from guard.rule import Reads
from guard.weights.head import State
from serve.engine.backend import BackendRequest, EngineOutput, SpokenSpan
from serve.engine.backends.vllm_engine import VllmBackend  # before vLLM: it sets what vLLM reads

# isort: split
from vllm import PoolingParams
from vllm.v1.request import Request
from vllm_encoder import register

# A request may be several rules', each of which takes of the states what it judges.
EVERYONE: Reads = "conversation"


@dataclass
class Reading:
    """A request on its way: the windows that are not read yet, by vLLM's ids, and what was read:
    of each window [spans, width] float32, and what each span says.
    """

    waiting: dict[str, Window]
    states: list[State] = field(default_factory=list)
    spans: list[SpokenSpan] = field(default_factory=list)
    tokens: int = 0


class EncoderBackend(VllmBackend):
    """The states of a conversation's spans, of which heads read the verdict. A request has at most
    `context_tokens` tokens before they are made into windows.
    """

    def __init__(
        self, engine_args: Mapping[str, Any], builder: EncoderPromptBuilder, context_tokens: int
    ) -> None:
        register()  # vLLM's own loading of plugins may have been told to leave it out
        super().__init__(engine_args, {})
        self._builder = builder
        self.context_tokens = context_tokens  # of a conversation, not of a window
        self._readings: dict[str, Reading] = {}

    def submit(self, request: BackendRequest) -> str:
        """Queue the windows of one conversation."""
        self._check(request)
        request_id = str(next(self._ids))
        windows = self._builder.windows([*request.prefix, *request.suffix], EVERYONE)
        waiting = {f"{request_id}.{index}": window for index, window in enumerate(windows)}
        self._readings[request_id] = Reading(waiting)
        try:
            for window_id, window in waiting.items():
                self._core.add_request(self._window_request(request, window_id, window))
        except BaseException as error:
            self.cancel([request_id])
            if isinstance(error, ValueError):
                problem = f"vLLM refuses the conversation: {error}"
                raise GuardError(problem, remedy="Run `make doctor`") from error
            raise
        return request_id

    def step(self) -> list[EngineOutput]:
        """Run one batch; the outputs of the requests whose last window it read."""
        outputs: list[EngineOutput] = []
        for finished in self._run_step():
            request_id = finished.request_id.partition(".")[0]
            reading = self._readings.get(request_id)
            if reading is None:
                continue
            window = reading.waiting.pop(finished.request_id)
            reading.tokens += len(window.token_ids)
            for start, end, speaker, turn in self._builder.spans(window):
                reading.spans.append(SpokenSpan(speaker, turn, window.token_ids[start:end]))
            reading.states.append(self._states(window, finished.pooling_output))
            if not reading.waiting:
                del self._readings[request_id]
                outputs.append(self._output(request_id, reading))
        return outputs

    def cancel(self, request_ids: Iterable[str]) -> None:
        window_ids: list[str] = []
        for request_id in request_ids:
            reading = self._readings.pop(request_id, None)
            if reading is not None:
                window_ids += reading.waiting
        self._engine.engine_core.abort_requests(window_ids)

    def forget(self) -> None:
        """Do nothing: an encoder keeps nothing. Raises GuardError while requests are in flight."""
        if self._readings:
            raise GuardError("requests are in flight", remedy="Wait for them, or cancel them")

    def scrub(self) -> None:
        self.forget()

    def _check(self, request: BackendRequest) -> None:
        if not request.wants_state:
            problem = "an encoder answers a rule with a head alone, and has no verdict of its own"
            raise GuardError(problem, remedy="Ask one of the engine's rules")
        self._check_length(request.tokens, self.context_tokens)

    def _window_request(self, request: BackendRequest, window_id: str, window: Window) -> Request:
        token_ids = list(window.token_ids)
        return Request(
            window_id,
            token_ids,
            None,
            self._params(window),
            arrival_time=time.time(),
            lora_request=self._activated(request, token_ids),
            priority=request.virtual_start,
        )

    def _params(self, window: Window) -> PoolingParams:
        return PoolingParams(task="token_embed", skip_reading_prefix_cache=True)

    def _states(self, window: Window, pooled: Any) -> State:
        """The means of the window's spans, [spans, hidden size] float32."""
        rows = pooled.float().numpy()
        means = [rows[start:end].mean(axis=0) for start, end, *_ in self._builder.spans(window)]
        return np.stack(means)

    def _output(self, request_id: str, reading: Reading) -> EngineOutput:
        states, spans = np.concatenate(reading.states), tuple(reading.spans)
        return EngineOutput(request_id, math.nan, 0, reading.tokens, states, spans)
