"""The fleet's servers: their slots, their memory, and a request that is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from guard.errors import GuardError
from serve.bench import engines
from serve.bench.workload import fleet_servers, peft_baseline
from serve.bench.workload.fleet_servers import SERVERS, EngineServer, servers
from tests.serve.bench.small_engine import small_recipe
from tests.serve.guarded import CONVERSATION, guard_engine

TEXT = "The assistant must not be rude."


@pytest.mark.slow
def test_a_refused_request_stops_the_benchmark() -> None:
    server = EngineServer(guard_engine())
    server.submit(CONVERSATION, TEXT, "nobody's rule")
    with pytest.raises(GuardError, match="refused"):
        server.computed_tokens()


@pytest.mark.parametrize(("device", "share"), [("cuda", 0.92 / 5), ("cpu", None)])
def test_engines_have_their_slots_and_with_peft_equal_parts_of_a_gpu_the_bare_base_none(
    device: str, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def toy_engine(*_: object, **engine_args: Any) -> contextlib.nullcontext[Any]:
        asked.append(engine_args)
        return contextlib.nullcontext(SimpleNamespace(step=None))

    monkeypatch.setattr(engines, "installed_device", lambda: device)
    monkeypatch.setattr(fleet_servers, "GuardEngine", toy_engine)
    monkeypatch.setattr(peft_baseline, "PeftBaseline", lambda *_: None)
    folders = {f"rule {number}": Path("nowhere") for number in range(40)}
    with servers(small_recipe(), folders, SERVERS) as running:
        assert set(running) == set(SERVERS)
        assert [args["max_loras"] for args in asked] == [1, 25, 32, 40]
        assert {args.get("gpu_memory_utilization") for args in asked} == {share}
        assert {args["enable_prefix_caching"] for args in asked} == {False}
