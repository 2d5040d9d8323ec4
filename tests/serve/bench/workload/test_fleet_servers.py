"""The fleet's servers: all answer the same requests, the bare base without adapters."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from guard.errors import GuardError
from serve.bench import engines
from serve.bench.workload import fleet_servers, peft_baseline
from serve.bench.workload.fleet_servers import (
    ALL_RESIDENT,
    BARE_BASE,
    ONE_SLOT,
    PEFT,
    EngineServer,
    servers,
)
from tests.serve.bench.small_engine import small_recipe
from tests.serve.guarded import CONVERSATION, guard_engine

TEXT = "The assistant must not be rude."


@pytest.mark.slow
def test_a_refused_request_stops_the_benchmark() -> None:
    server = EngineServer(guard_engine())
    server.submit(CONVERSATION, TEXT, "nobody's rule")
    with pytest.raises(GuardError, match="refused"):
        server.computed_tokens()


@pytest.mark.parametrize(("device", "share"), [("cuda", 0.92 / 3), ("cpu", None)])
def test_engines_and_peft_have_equal_parts_of_a_gpu_and_the_bare_base_needs_none(
    device: str, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def toy_engine(*_: object, **engine_args: Any) -> contextlib.nullcontext[Any]:
        asked.append(engine_args)
        return contextlib.nullcontext(SimpleNamespace(step=None))

    monkeypatch.setattr(engines, "installed_device", lambda: device)
    monkeypatch.setattr(fleet_servers, "GuardEngine", toy_engine)
    monkeypatch.setattr(peft_baseline, "PeftBaseline", lambda *_: None)
    with servers(small_recipe(), {}, (PEFT, ONE_SLOT, ALL_RESIDENT, BARE_BASE)):
        assert [args.get("gpu_memory_utilization") for args in asked] == [share, share]
