"""Seam: asynchronous prefetch, adapters are made ready while steps run, not in them.

vLLM reads, packs, scales and pins an adapter in the step that needs it, and everybody in that step
waits. Here a request whose adapter is not in host memory stays in the scheduler's queue while a
thread does this, and `placed` hands the adapter over when a step asks. The scheduler is asked
through the connector of `partial_block`; without it, or with scheduler and worker in different
processes, nothing changes. Remove when vLLM makes adapters ready beside its steps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from ..seam import seam, setting

# In EngineArgs.additional_config: how many adapters are read ahead at most, 0 to read them in the
# step.
PREFETCH = "vllm_alora_prefetch"
DEFAULT_PREFETCH = 8
IDLE_S = 0.005  # how long a step that has nothing to run waits for an adapter

_this_thread = threading.local()  # `reading`: this thread reads ahead


class Prefetch:
    """Reads the adapters of waiting requests in order. Only `_read` runs in another thread."""

    def __init__(self, worker_manager: Any, max_ahead: int) -> None:
        self._manager = worker_manager
        self._max_ahead = max_ahead
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter")
        # Adapter id -> the adapter, the first asked for first.
        self._read_ahead: OrderedDict[int, Future[Any]] = OrderedDict()
        # Whether somebody asks `failed_of`: then an adapter that cannot be read is entered in
        # `failed`, by its id, and waits for that. Else the step that needs it raises the error.
        self.reports_failures = False
        self.failed: dict[int, Exception] = {}
        self._wanted: set[int] = set()  # adapters asked for since the last step was scheduled
        # And in the one before: whoever waits for one asks again and again.
        self._wanted_before: set[int] = set()

    def begin_step(self) -> None:
        self._wanted_before = self._wanted
        self._wanted = set()

    def is_ready(self, lora_request: Any) -> bool:
        """Whether a step can have the adapter at once. If not, it will be read."""
        adapter = lora_request.lora_int_id
        self._wanted.add(adapter)
        if adapter in self._manager._adapter_manager._registered_adapters:
            return True
        if adapter in self.failed:
            return False  # and it is not read again for those that are about to be refused
        if adapter not in self._read_ahead:
            if len(self._read_ahead) >= self._max_ahead and not self._drop_one():
                return False  # asked again in the next step
            self._read_ahead[adapter] = self._reader.submit(self._read, lora_request)
        future = self._read_ahead[adapter]
        if not future.done():
            return False
        error = future.exception()
        if self.reports_failures and isinstance(error, Exception):
            del self._read_ahead[adapter]
            self.failed[adapter] = error
            return False
        return True

    def take(self, adapter: int) -> Any | None:
        """The adapter if it was read ahead, or None. Raises what reading it raised."""
        if getattr(_this_thread, "reading", False) or adapter not in self._read_ahead:
            return None
        return self._read_ahead.pop(adapter).result()

    def wait(self) -> None:
        """Wait a moment for the next adapter, if one is being read."""
        pending = [future for future in self._read_ahead.values() if not future.done()]
        if pending:
            wait(pending[:1], timeout=IDLE_S)

    def _drop_one(self) -> bool:
        """Forget the oldest adapter that was read and that nobody asks for any longer."""
        wanted = self._wanted | self._wanted_before
        for adapter, future in self._read_ahead.items():
            if future.done() and adapter not in wanted:
                del self._read_ahead[adapter]
                return True
        return False

    def _read(self, lora_request: Any) -> Any:
        """The adapter, read and packed, by what is settled with the engine's start."""
        _this_thread.reading = True
        lora = self._manager._load_adapter(lora_request)
        self._manager._adapter_manager._create_merged_loras_inplace(lora)
        return lora


@seam("vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace", "self lora_model")
def create_merged_loras(original: Callable[..., None], self: Any, lora_model: Any) -> None:
    """Pack, scale and pin an adapter's weights, once: not again what was read ahead."""
    if not getattr(lora_model, "is_packed", False):
        original(self, lora_model)
        lora_model.is_packed = True


def connect(engine_core: Any) -> None:
    """Let scheduler and worker share one Prefetch, if both are here. Called with every request."""
    if vars(engine_core).setdefault("prefetch_connected", False):
        return
    engine_core.prefetch_connected = True
    manager = _at(engine_core, "model_executor.driver_worker.worker.model_runner.lora_manager")
    connector = _at(engine_core, "scheduler.connector")
    if manager is None or not hasattr(connector, "prefetch"):
        return
    ahead = setting(engine_core.vllm_config, PREFETCH, DEFAULT_PREFETCH)
    if ahead > 0:
        manager.prefetch = connector.prefetch = Prefetch(manager, ahead)


def failed_of(engine_core: Any) -> dict[int, Exception]:
    """Which adapters could not be read since the last call, and why. Who has called this once has
    to refuse their requests. Nobody else does: they wait. Without a call the step that needs such
    an adapter raises the error.
    """
    prefetch = _at(engine_core, "scheduler.connector.prefetch")
    if prefetch is None:
        return {}
    prefetch.reports_failures = True
    failed: dict[int, Exception] = prefetch.failed
    prefetch.failed = {}
    return failed


def _at(start: Any, path: str) -> Any:
    """The attribute of an attribute of …, or None if the way ends."""
    for name in path.split("."):
        start = getattr(start, name, None)
    return start
