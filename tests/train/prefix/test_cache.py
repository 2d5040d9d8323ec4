"""Cached keys and values are those that the base computes for each prefix alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from pytest import MonkeyPatch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from guard.errors import GuardError
from guard.recipe import PrefixCacheSize
from tests.train.conftest import BASES, MakeJob, calls_of
from train.prefix.cache import GIB, Budget, Prefix, PrefixCache, budget_of, free_memory

PREFIXES = [(5, 6, 7), tuple(range(20, 60)), (9,), tuple(range(100, 117)), (5, 6, 7)]


@pytest.fixture
def qwen(toy_base: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(toy_base).eval()  # type: ignore[no-any-return]


@pytest.fixture(params=["qwen3", "llama, one KV head"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return BASES[request.param]().eval()


@pytest.fixture
def per_token(qwen: PreTrainedModel) -> int:
    """Bytes."""
    return PrefixCache(qwen, Budget()).bytes_per_token


BUDGETS = [Budget(), *(Budget(**{tier: 10**9}) for tier in ("device", "host"))]


@pytest.mark.parametrize("opening", [(), tuple(range(50, 71))])
@pytest.mark.parametrize("budget", [*BUDGETS, Budget(20_480, 10_240), Budget(host=30_000)])
def test_rows_are_their_prefixes(model: PreTrainedModel, budget: Budget, opening: Prefix) -> None:
    """Each alone, whatever fits the budget, and however all of them begin."""
    rows = [(*opening, *prefix) for prefix in PREFIXES]
    prefixes = PrefixCache(model, budget)
    prefixes.fill(rows[:3])
    for chosen in (rows[:4], rows[3::-1], rows[2:4]):  # computed, and read again
        for prefix, states in zip(chosen, prefixes.read(chosen), strict=True):
            with torch.inference_mode():
                alone = model(torch.tensor([prefix]), use_cache=True).past_key_values
            for found, expected in zip(states, alone, strict=True):
                torch.testing.assert_close(found, torch.cat(expected[:2]), rtol=1e-4, atol=1e-5)


def test_misses_are_a_pass(qwen: PreTrainedModel, per_token: int, monkeypatch: MonkeyPatch) -> None:
    computed = calls_of(monkeypatch, PrefixCache, "_computed")
    prefixes = PrefixCache(qwen, Budget(host=40 * per_token))
    prefixes.fill(PREFIXES)
    prefixes.fill([(1, 2, 3)])  # there is no room for others
    prefixes.read(PREFIXES[:4])
    assert [asked for _, asked in computed[1:2]] == [[PREFIXES[1]]]
    assert [len(asked) for _, asked in computed[2:]] == [3]


def test_a_base_with_sliding_windows_is_refused() -> None:
    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**small, sliding_window=8, layer_types=layers)
    with pytest.raises(GuardError, match="does not keep the keys and values of every position"):
        PrefixCache(Gemma3ForCausalLM(config).eval(), Budget()).read([(1, 2, 3)])


def test_what_lies_nowhere(qwen: PreTrainedModel, per_token: int) -> None:
    """It has to be fetched; a prefix that is too long leaves room to others."""
    prefixes = PrefixCache(qwen, Budget(host=41 * per_token))
    prefixes.fill(PREFIXES)
    tokens = [prefixes.bytes_to_fetch(prefix) // per_token for prefix in PREFIXES[:4]]
    assert tokens == [3, 0, 0, 17]
    prefixes = PrefixCache(qwen, Budget(host=39 * per_token))
    assert prefixes.fill(PREFIXES) == 40
    assert sorted(map(len, prefixes._kept)) == [1, 3, 17]


def free(monkeypatch: MonkeyPatch, size: int) -> None:
    memory = psutil.virtual_memory()._replace(available=size)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_half_of_the_free_memory_is_taken(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    job = make_job("alora")
    free(monkeypatch, 8 * GIB)
    monkeypatch.setattr("train.prefix.cache.free_memory.__defaults__", (Path("/none"),) * 2)

    def stated(**gib: float) -> Budget:
        recipe = job.recipe.model_copy(update={"prefix_cache_gib": PrefixCacheSize(**gib)})
        return budget_of(replace(job, recipe=recipe), torch.device("cpu"))

    assert stated() == Budget(host=4 * GIB)
    assert stated(host=8.0) == Budget(host=8 * GIB)
    for tier, room in (("host", "8.0"), ("device", "0.0")):
        told = rf"recipe toy: prefix_cache_gib\.{tier}: .*got 9 GiB, {room} free"
        with pytest.raises(GuardError, match=told):
            stated(**{tier: 9.0})


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text + "\n")


def test_limits_of_control_groups_hold_too(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """Pages of files count as free. A group over its limit leaves nothing."""
    free(monkeypatch, 1000)
    own, groups = tmp_path / "own", tmp_path / "groups"
    assert free_memory(groups, own) == 1000
    own.write_text("4:memory:/other\n0::/service/job\n")
    group(groups / "service" / "job", max="max", current="100")
    assert free_memory(groups, own) == 1000
    group(groups / "service", max="500", current="300", stat="anon 200\ninactive_file 60")
    assert free_memory(groups, own) == 260
    group(groups, max="500", current="600")
    assert free_memory(groups, own) == 0


def test_limits_of_control_groups_of_version_1_hold_too(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    free(monkeypatch, 1000)
    own, memory = tmp_path / "own", tmp_path / "groups" / "memory"
    own.write_text("5:cpu,cpuacct:/other\n4:hugetlb,memory:/job\n1:name=systemd:/job\n")
    used = {"usage_in_bytes": "300", "stat": "inactive_file 1\ntotal_inactive_file 60"}
    group(memory / "job", limit_in_bytes="9223372036854771712", **used)
    assert free_memory(tmp_path / "groups", own) == 1000
    group(memory, limit_in_bytes="500", **used)
    assert free_memory(tmp_path / "groups", own) == 260
