"""The fleet's servers and their adapters.

The PEFT baseline answers as PEFT does and keeps an LRU, or beating it would mean nothing.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from guard.errors import GuardError
from serve.bench import engines
from serve.bench.workload import fleet_servers, peft_baseline
from serve.bench.workload.adapters import save_random_adapters
from serve.bench.workload.fleet_servers import SERVERS, EngineServer, servers
from serve.bench.workload.peft_baseline import PeftBaseline
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import recipe
from tests.serve.guarded import CONVERSATION, guard_engine, peft_logit, save_adapter
from tests.serve.heads import reference_logit

pytestmark = pytest.mark.slow

TEXT = "The assistant must not be rude."


def test_a_refused_request_stops_the_benchmark() -> None:
    server = EngineServer(guard_engine())
    server.submit(CONVERSATION, TEXT, "nobody's rule")
    with pytest.raises(GuardError, match="refused"):
        server.computed_tokens()


@pytest.mark.parametrize(("device", "share"), [("cuda", 0.92 / 5), ("cpu", None)])
def test_engines_have_their_slots_and_with_peft_equal_parts_of_a_gpu_the_bare_base_none(
    device: str, share: float | None, monkeypatch: MonkeyPatch
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("baseline")
    return {
        name: save_adapter(root / name, name, seed=seed)
        for seed, name in enumerate(("one", "two", "three"))
    }


def test_every_answer_is_peft_s_whatever_was_in_the_batch(folders: dict[str, Path]) -> None:
    server = PeftBaseline(recipe(), folders, capacity=2)
    turns, names = (1, 2, 3, 2, 3, 1, 3, 1, 2), list(folders) * 3
    wanted = [(CONVERSATION[:turn], name) for turn, name in zip(turns, names, strict=True)]
    requests = [server.submit(messages, TEXT, name) for messages, name in wanted]
    steps = 0
    while not all(request.done for request in requests):
        server.step()
        steps += 1
    assert steps == 5  # two of the three adapters at a time
    expected = [peft_logit(messages, TEXT, folders[name]) for messages, name in wanted]
    assert [request.logit for request in requests] == pytest.approx(expected, abs=2e-3)
    assert len({round(logit, 3) for logit in expected}) == len(expected)
    dense: list[str] = []  # what oneDNN does not compute, nor an adapter
    for name, layer in server._model.named_modules():
        if type(layer) is torch.nn.Linear and "lora_" not in name:
            dense.append(name.rpartition(".")[2])
    assert dense == ["lm_head"]


def test_the_least_recently_used_adapter_is_read_again(folders: dict[str, Path]) -> None:
    server = PeftBaseline(recipe(), folders, capacity=2, batch=2)
    read = []
    for name in ("one", "two", "one", "three", "one", "two"):
        before = server.loads
        request = server.submit(CONVERSATION[:1], TEXT, name)
        server.step()
        expected = peft_logit(CONVERSATION[:1], TEXT, folders[name])
        assert request.logit == pytest.approx(expected, abs=2e-3)
        read.append(server.loads - before)
    assert read == [0, 1, 0, 1, 0, 1]  # the first came with the start
    requests = [server.submit(CONVERSATION[:1], TEXT, "one") for _ in range(3)]
    server.step()
    assert [request.done for request in requests] == [True, True, False]


@pytest.mark.parametrize(
    ("method", "head"), [("lora", None), ("alora", None), ("alora", {})], ids=str
)
def test_random_adapters_have_the_recipe_s_rank_and_are_served_like_trained_ones(
    tmp_path: Path, method: str, head: dict[str, object] | None
) -> None:
    settings = recipe().methods[method].model_copy(update={"head": head})
    of_method = recipe().model_copy(update={"methods": recipe().methods | {method: settings}})
    folder, engine = tmp_path / method, guard_engine()
    save_random_adapters([folder], of_method, method)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["r"] == settings.lora["r"]
    engine.add("random", folder)
    rule_text = engine.rules["random"].rule_text
    (verdict,) = engine.check(CONVERSATION, ["random"]).verdicts
    engine.remove("random")
    expected = peft_logit(CONVERSATION, rule_text, folder)
    if head is not None:
        expected = reference_logit(CONVERSATION, rule_text, folder)
    assert verdict.logit == pytest.approx(expected, abs=2e-3)
    assert verdict.logit != pytest.approx(peft_logit(CONVERSATION, rule_text, None), abs=2e-3)
