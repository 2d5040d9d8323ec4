"""What is in flight, in virtual time, and what happens when a step fails or a logit is NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping

from guard.errors import GuardError
from serve.engine.backend import Backend, Loaded
from serve.engine.call import Call, InFlight
from serve.engine.plan import FairQueue

# A quantum in full steps: a rule behind a call of a thousand LoRAs waits for so many steps,
# not for all of them.
QUANTUM_STEPS = 4
MAX_RESTARTS = 3  # of a request, after a NaN logit of its own or of another
MAX_OWN_RESTARTS = 2  # of these, because of its own


class Dispatcher:
    """Submits to the backend and hands its outputs to the calls that wait for them. `virtual_time`
    is that of `FairQueue`: the own tokens of what has been answered, refused, or cancelled when its
    time had come. `is_usable` is False once a failed batch could not be cleared away: then nothing
    more is answered.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.in_flight: dict[str, InFlight] = {}  # by the backend's request ids
        self.virtual_time = 0
        self.is_usable = True

    def check_usable(self) -> None:
        if not self.is_usable:
            problem = "the engine failed and could not be cleared, so its answers could be wrong"
            raise GuardError(problem, remedy="Start it again")

    def needs(self, adapter: Loaded) -> bool:
        return any(in_flight.request.adapter == adapter for in_flight in self.in_flight.values())

    def queue(self) -> FairQueue:
        return FairQueue(self.virtual_time, QUANTUM_STEPS * self._backend.step_tokens)

    def submit(self, in_flight: InFlight) -> None:
        try:
            request_id = self._backend.submit(in_flight.request)
        except GuardError as error:
            self.virtual_time += in_flight.own_tokens
            in_flight.refuse(str(error), "weights_unavailable")
            return
        in_flight.call.waiting[request_id] = in_flight
        self.in_flight[request_id] = in_flight

    def step(self) -> None:
        """Run one batch and hand its outputs to their calls. If it fails, everything in flight is
        dropped. After a NaN logit, its request and what is still in flight begin again: all may
        have read the same broken keys and values. The third NaN of one request is a refusal.
        """
        self.check_usable()
        suspects: dict[str, int] = {}  # request id -> its computed tokens
        is_clean = True
        try:
            outputs = self._backend.step()
            for adapter_id, error in self._backend.unreadable().items():
                self._refuse_adapter(adapter_id, error)
            for output in outputs:
                in_flight = self.in_flight.get(output.request_id)
                if in_flight is None:
                    is_clean = is_clean and math.isfinite(output.logit)
                    continue
                logits = in_flight.logits(output)
                is_number = all(math.isfinite(logit) for logit in logits)
                is_clean = is_clean and is_number
                if is_number or in_flight.nan_answers >= MAX_OWN_RESTARTS:
                    del self.in_flight[output.request_id]
                    self.virtual_time += in_flight.own_tokens
                    in_flight.call.settle(output, logits)
                else:
                    suspects[output.request_id] = output.computed_tokens
        except BaseException:  # Ctrl+C too; whatever is not settled here would wait for ever
            self._recover()
            raise
        if not is_clean:
            self._start_over(suspects)

    def cancel(self, call: Call) -> None:
        """Drop the requests of `call` in flight. Work that may have begun counts as answered, or
        else a caller who always cancels would be served first for ever.
        """
        begun = 0
        for request_id in call.waiting:
            in_flight = self.in_flight.get(request_id)
            if in_flight is not None and in_flight.request.virtual_start <= self.virtual_time:
                begun += in_flight.own_tokens
        self._drop(call)
        self.virtual_time += begun

    def _refuse_adapter(self, adapter_id: int, error: Exception) -> None:
        """Refuse what is in flight for an adapter that could not be read again."""
        why = f"the adapter cannot be read: {error}. Train it again, or restore its folder"
        for request_id, in_flight in list(self.in_flight.items()):
            adapter = in_flight.request.adapter
            if adapter is not None and adapter.adapter_id == adapter_id:
                self._backend.cancel([request_id])
                del self.in_flight[request_id]
                self.virtual_time += in_flight.own_tokens
                del in_flight.call.waiting[request_id]
                in_flight.refuse(why, "weights_unavailable")

    def _drop(self, call: Call) -> None:
        self._backend.cancel(call.waiting)
        for request_id in call.waiting:
            self.in_flight.pop(request_id, None)
        call.waiting.clear()

    def _recover(self) -> None:
        """Leave nothing of a failed batch behind; only if that fails is the engine unusable. vLLM
        enters a batch's blocks into its prefix cache before it computes them, and leaves them there
        when it does not. And a NaN key or value spreads from a block that was freed to whoever is
        given it next, even from slots that are masked out.
        """
        calls = {id(in_flight.call): in_flight.call for in_flight in self.in_flight.values()}
        try:
            for call in calls.values():
                self._drop(call)
            self._backend.scrub()
        except BaseException:
            self.is_usable = False
            raise

    def _start_over(self, suspects: Mapping[str, int]) -> None:
        """Clear the caches, and submit again what is in flight. Requests without an answer go
        first. Then the `suspects`, whose logit was NaN, the one that computed least first: the one
        that computed the conversation may have spoiled it.
        """
        ids = sorted(self.in_flight, key=lambda request_id: suspects.get(request_id, -1))
        restarting = {request_id: self.in_flight[request_id] for request_id in ids}
        starts = [in_flight.request.virtual_start for in_flight in restarting.values()]
        last_start = 1 + max(starts, default=0)
        self._recover()
        for request_id, in_flight in restarting.items():
            if in_flight.restarts >= MAX_RESTARTS:
                self.virtual_time += in_flight.own_tokens
                why = "requests of its batch gave NaN logits, time and again. Ask again"
                in_flight.refuse(why, "nan", "batch")
            elif request_id in suspects:
                self.submit(_suspected(in_flight, last_start))
            else:
                self.submit(in_flight._replace(restarts=in_flight.restarts + 1))


def _suspected(in_flight: InFlight, virtual_start: int) -> InFlight:
    return in_flight._replace(
        request=in_flight.request._replace(virtual_start=virtual_start),
        restarts=in_flight.restarts + 1,
        nan_answers=in_flight.nan_answers + 1,
    )
