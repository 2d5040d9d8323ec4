"""What workers are asked, of engines with adapters and without."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from serve.engine import GuardEngine
from serve.engine.backends import worker
from tests.serve.engine.shared import runner
from tests.serve.guarded import CONVERSATION

pytestmark = pytest.mark.slow


def test_keys_and_values_are_overwritten(engine: GuardEngine) -> None:
    engine.check(CONVERSATION)
    caches = runner(engine).kv_caches
    assert any(cache.any() for cache in caches)
    worker.zero_kv(SimpleNamespace(model_runner=runner(engine)))
    assert not any(cache.any() for cache in caches)
    engine.backend.forget()  # what it knows of the cache


def test_an_engine_without_adapters_has_loaded_none() -> None:
    bare = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[torch.ones(2)]))
    assert worker.counts(bare) == (0, 0, 0, 0)
    worker.forget_pointers(bare)
