"""What workers are asked, of engines with adapters and without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serve.engine import GuardEngine
from serve.engine.backends import worker
from tests.serve.guarded import CONVERSATION

pytestmark = pytest.mark.slow


def of(engine: GuardEngine) -> Any:
    backend: Any = engine.backend
    return backend._engine.engine_core.engine_core.model_executor.driver_worker.worker


def test_an_engine_s_worker_says_what_it_has_and_has_done(engine: GuardEngine) -> None:
    before, passes = worker.scheduled_tokens(of(engine)), worker.forward_passes(of(engine))
    engine.check(CONVERSATION)
    assert worker.scheduled_tokens(of(engine)) > before
    assert worker.forward_passes(of(engine)) > passes
    assert worker.swap_ins(of(engine)) >= len(worker.in_slots(of(engine))) > 0
    assert worker.adapter_loads(of(engine)) > 0
    assert worker.gives_states(of(engine)) and worker.take_states(of(engine)) == {}


def test_keys_and_values_are_overwritten(engine: GuardEngine) -> None:
    engine.check(CONVERSATION)
    caches = of(engine).model_runner.kv_caches
    assert any(cache.any() for cache in caches)
    worker.zero_kv(of(engine))
    assert not any(cache.any() for cache in caches)
    engine.backend.forget()  # what it knows of the cache


def test_an_engine_without_adapters_has_loaded_none() -> None:
    bare = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[torch.ones(2)]))
    assert worker.swap_ins(bare) == worker.adapter_loads(bare) == 0
    assert worker.scheduled_tokens(bare) == worker.forward_passes(bare) == 0
    worker.forget_pointers(bare)
