"""vLLM with GLiNER2, as with an encoder, but the model itself gives the logit, with an adapter or
without, at the rule's label alone; of several windows the highest counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from guard.errors import GuardError
from guard.prompt.windows import Window
from guard.weights.head import State
from serve.engine.backend import BackendRequest, EngineOutput
from serve.engine.backends.encoder import EncoderBackend, Reading  # before vLLM, as there

# ruff: isort: split
from vllm import PoolingParams
from vllm_encoder.gliner import LABEL_POSITIONS


class Gliner2Backend(EncoderBackend):
    """GLiNER2: logits of rules' labels, of which a window has one."""

    def _check(self, request: BackendRequest) -> None:
        if request.wants_state:
            problem = "GLiNER2 gives the logit of a label, and no state that a head could read"
            raise GuardError(problem, remedy="Serve the rule with an adapter")
        self._check_length(request.tokens, self.context_tokens)

    def _params(self, window: Window) -> PoolingParams:
        params = super()._params(window)
        positions = [span.start for span in self._builder.spans(window)]
        params.extra_kwargs = {LABEL_POSITIONS: positions}
        return params

    def _states(self, window: Window, pooled: Any) -> State:
        """The logit of the window's label in nats, [1, 1] float32."""
        logits: State = pooled.float().numpy()
        return logits

    def _output(self, request_id: str, reading: Reading) -> EngineOutput:
        highest = float(np.max(np.concatenate(reading.states)))
        return EngineOutput(request_id, highest, 0, reading.tokens)
