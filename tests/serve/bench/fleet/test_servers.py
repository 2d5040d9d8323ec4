"""The fleet's servers: all answer the same requests, the bare base without adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guard.errors import GuardError
from serve.bench import memory
from serve.bench.fleet import peft_baseline
from serve.bench.fleet import servers as fleet_servers
from serve.bench.fleet.report import ALL_RESIDENT, BARE_BASE, ONE_SLOT, PEFT
from serve.bench.fleet.servers import EngineServer, FleetServer, servers
from tests.serve import encoder_rules
from tests.serve.bench.small_engine import small_recipe
from tests.serve.guarded import CONVERSATION, guard_engine, save_adapter

pytestmark = pytest.mark.slow

TEXT = "The assistant must not be rude."


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, FleetServer]]:
    root: Path = tmp_path_factory.mktemp("servers")
    folders = {
        name: save_adapter(root / name, name, seed=seed, text=TEXT)
        for seed, name in enumerate(("first", "second"))
    }
    with servers(small_recipe(), folders, (PEFT, ALL_RESIDENT, BARE_BASE)) as all_servers:
        yield all_servers


def test_every_server_answers_and_counts_what_it_computed(running: dict[str, FleetServer]) -> None:
    assert list(running) == [PEFT, ALL_RESIDENT, BARE_BASE]
    computed = set()
    for server in running.values():
        server.begin()
        done = [server.submit(CONVERSATION, TEXT, name) for name in ("first", "second")]
        while not all(answered() for answered in done):
            server.step()
        computed.add(server.computed_tokens)
        server.begin()
        assert server.computed_tokens == 0
    assert len(computed) == 1


def test_an_encoder_s_bare_base_is_a_head_on_it(tmp_path: Path) -> None:
    folders = {"rule": encoder_rules.save_encoder_rule(tmp_path / "rule", seed=1)}
    heads = {"bare": encoder_rules.save_encoder_head(tmp_path / "bare", seed=1)}
    eager = encoder_rules.recipe()
    eager = eager.model_copy(update={"engine": eager.engine | {"enforce_eager": True}})
    with servers(eager, folders, (PEFT, ONE_SLOT, BARE_BASE), heads) as running:
        computed = set()
        for server in running.values():
            server.begin()
            answered = server.submit(CONVERSATION, "", "rule")
            while not answered():
                server.step()
            computed.add(server.computed_tokens)
        assert len(computed) == 1
        assert running[ONE_SLOT].swap_ins == 1


def test_a_refused_request_stops_the_benchmark() -> None:
    server = EngineServer(guard_engine())
    server.submit(CONVERSATION, TEXT, "nobody's rule")
    with pytest.raises(GuardError, match="refused"):
        _ = server.computed_tokens


@pytest.mark.parametrize(("device", "share"), [("cuda", 0.92 / 3), ("cpu", None)])
def test_engines_and_peft_have_equal_parts_of_a_gpu_and_the_bare_base_needs_none(
    device: str, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def toy_engine(*_: object, **engine_args: Any) -> contextlib.nullcontext[None]:
        asked.append(engine_args)
        return contextlib.nullcontext()

    monkeypatch.setattr(memory, "installed_device", lambda: device)
    monkeypatch.setattr(fleet_servers, "GuardEngine", toy_engine)
    monkeypatch.setitem(peft_baseline.BASELINES, "decoder", lambda *_, **__: None)
    with servers(small_recipe(), {}, (PEFT, ONE_SLOT, ALL_RESIDENT, BARE_BASE)):
        assert [args.get("gpu_memory_utilization") for args in asked] == [share, share]
