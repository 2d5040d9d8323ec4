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
    before = worker.counts(of(engine))
    engine.check(CONVERSATION)
    counts = worker.counts(of(engine))
    assert counts.scheduled_tokens > before.scheduled_tokens
    assert counts.forward_passes > before.forward_passes
    assert counts.swap_ins >= len(worker.in_slots(of(engine))) > 0
    assert counts.adapter_loads > 0
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
    assert worker.counts(bare) == (0, 0, 0, 0)
    worker.forget_pointers(bare)
