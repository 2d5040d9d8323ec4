"""Adapters are read beside the steps: the reader by itself, and vLLM with two of four."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from vllm import SamplingParams
from vllm.lora import model_manager
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm_alora.weights.prefetch import PREFETCH, Prefetch, connect

from guard.prompt.decoder import PromptBuilder
from tests.serve.adapters import save_random_adapter
from tests.serve.served import Served
from tests.serve.vllm_alora.checked_engine import assert_peft, prompt_for

pytestmark = pytest.mark.slow

SLOW_S = 0.4


class ToyManager:
    """Reads adapters when it is let; `broken` ones raise."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.read: list[int] = []
        self.packed: list[str] = []
        self._adapter_manager = SimpleNamespace(
            _registered_adapters={1: "in memory"},
            _create_merged_loras_inplace=self.packed.append,
        )
        self.prefetch = Prefetch(self, max_ahead=2)

    def _load_adapter(self, lora_request: Any) -> str:
        # The reading thread must not wait for itself.
        assert self.prefetch.take(lora_request.lora_int_id) is None
        assert self.go.wait(10)
        self.read.append(lora_request.lora_int_id)
        if lora_request.lora_int_id == 13:
            raise OSError("broken")
        return f"adapter {lora_request.lora_int_id}"

    def is_ready(self, *numbers: int) -> list[bool]:
        return [self.prefetch.is_ready(asked(number)) for number in numbers]

    def until_ready(self, *numbers: int) -> None:
        self.go.set()
        end = time.monotonic() + 10
        while not all(self.is_ready(*numbers)):
            assert time.monotonic() < end
            self.prefetch.wait()


def asked(number: int) -> Any:
    return SimpleNamespace(lora_int_id=number)


def test_what_is_in_memory_is_ready_and_the_rest_is_read_once_and_in_order() -> None:
    manager = ToyManager()
    assert manager.is_ready(1, 5, 4, 5, 4) == [True, *[False] * 4]
    manager.until_ready(5, 4)
    assert manager.read == [5, 4]
    assert manager.packed == ["adapter 5", "adapter 4"]
    taken = [manager.prefetch.take(number) for number in (4, 4, 5)]
    assert taken == ["adapter 4", None, "adapter 5"]
    assert manager.packed == ["adapter 5", "adapter 4"]
    manager.prefetch.wait()  # which ends when nothing is read


def test_only_so_many_are_read_ahead_and_one_that_nobody_takes_makes_room() -> None:
    manager = ToyManager()
    assert not any(manager.is_ready(4, 5, 6, 7))
    manager.until_ready(4, 5)
    for _ in range(2):
        assert manager.is_ready(6) == [False]
        # Both were asked for in the step that is being scheduled, or in the one before.
        assert manager.read == [4, 5]
        manager.prefetch.begin_step()
    manager.until_ready(6)
    assert manager.read == [4, 5, 6]
    assert manager.prefetch.take(4) is None
    assert manager.prefetch.take(6) == "adapter 6"


def test_what_is_asked_for_again_is_not_dropped_for_others_although_it_is_read_in_between() -> None:
    manager = ToyManager()
    assert manager.is_ready(4, 5) == [False, False]
    manager.go.set()
    wait([manager.prefetch._read_ahead[number] for number in (4, 5)])
    assert manager.is_ready(6) == [False]
    manager.prefetch.begin_step()
    assert manager.is_ready(4, 5) == [True, True]
    assert manager.read == [4, 5]


def test_an_error_is_raised_to_whoever_takes_the_adapter_and_the_next_one_is_read() -> None:
    manager = ToyManager()
    manager.until_ready(13)
    with pytest.raises(OSError, match="broken"):
        manager.prefetch.take(13)
    manager.until_ready(4)


def toy_core(ahead: int) -> Any:
    """An engine core with what `connect` looks at."""
    runner = SimpleNamespace(lora_manager=SimpleNamespace(prefetch=None))
    driver = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    return SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=driver),
        scheduler=SimpleNamespace(connector=SimpleNamespace(prefetch=None)),
        vllm_config=SimpleNamespace(additional_config={PREFETCH: ahead}),
    )


def test_an_engine_that_is_to_read_none_ahead_has_no_prefetch() -> None:
    for ahead in (0, 3):
        core = toy_core(ahead)
        connect(core)
        assert (core.scheduler.connector.prefetch is None) == (ahead == 0)
        manager = core.model_executor.driver_worker.worker.model_runner.lora_manager
        assert manager.prefetch is core.scheduler.connector.prefetch


@pytest.fixture(scope="module")
def small_engine() -> Iterator[Served]:
    engine = Served.start(max_loras=2, max_cpu_loras=2, num_gpu_blocks_override=200)
    connect(engine.core)
    yield engine
    engine.close()


@pytest.fixture(params=[True, False])
def small(request: pytest.FixtureRequest, small_engine: Served, monkeypatch: MonkeyPatch) -> Served:
    """The engine, and without prefetch: it then reads adapters in the step."""
    if not request.param:
        monkeypatch.setattr(small_engine.scheduler.connector, "prefetch", None)
        monkeypatch.setattr(small_engine.runner.lora_manager, "prefetch", None)
    return small_engine


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, prompts: PromptBuilder) -> list[str]:
    root, invocation = tmp_path_factory.mktemp("four"), prompts.invocation("a rule")
    folders = []
    for seed, rank in enumerate((16, 4, 16, 4)):
        folder = root / str(seed)
        folders.append(save_random_adapter(folder, seed=seed, rank=rank, invocation=invocation))
    return folders


@pytest.fixture
def prompt(prompts: PromptBuilder) -> list[int]:
    return prompt_for(prompts.invocation("a rule"), before=40, after=9, seed=3)


def test_adapters_that_are_read_again_and_again_answer_as_peft_does(
    small: Served, four: list[str], prompts: PromptBuilder
) -> None:
    """Both ways: read ahead, and in the step."""
    invocation = prompts.invocation("a rule")
    asked = [prompt_for(invocation, before=40 + n, after=9, seed=n) for n in range(8)]
    for _ in range(2):
        assert_peft(small.ask(asked, four * 2), asked, four * 2)
    small.reset()


def test_nobody_waits_for_others_adapters(
    small: Served, four: list[str], prompt: list[int]
) -> None:
    """A cold adapter takes long to read: if it is read ahead, others are answered meanwhile."""
    is_ahead = small.scheduler.connector.prefetch is not None
    small.ask([prompt] * 2, four[:2])
    manager, engine = small.runner.lora_manager, small.llm.llm_engine
    read = type(manager)._load_adapter
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    answered: set[str] = set()
    warm_answered = threading.Event()
    were_answered: list[bool] = []  # those in memory, before each adapter that was read

    def read_slowly(request: Any) -> Any:
        were_answered.append(warm_answered.wait(30 if is_ahead else SLOW_S))
        return read(manager, request)

    manager._load_adapter = read_slowly
    try:
        for name, folder in (("cold", four[3]), ("warm 0", four[0]), ("warm 1", four[1])):
            inputs, lora = {"prompt_token_ids": prompt}, small.request(folder)
            engine.add_request(name, inputs, params, lora_request=lora)
        while engine.has_unfinished_requests():
            answered |= {output.request_id for output in engine.step() if output.finished}
            if {"warm 0", "warm 1"} <= answered:
                warm_answered.set()
    finally:
        del manager._load_adapter
    assert were_answered[0] == is_ahead and "cold" in answered


@pytest.fixture
def made_ready_by(monkeypatch: MonkeyPatch) -> list[threading.Thread]:
    """The threads that pack, scale or pin weights from now on, as on a machine that pins."""
    threads: list[threading.Thread] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return original(*args)

        return call

    monkeypatch.setattr(model_manager, "PIN_MEMORY", True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", noted(lambda tensor: tensor))
    monkeypatch.setattr(PackedLoRALayerWeights, "pack", noted(PackedLoRALayerWeights.pack))
    for kind in (LoRALayerWeights, PackedLoRALayerWeights):
        monkeypatch.setattr(kind, "optimize", noted(kind.optimize))
    return threads


def test_a_step_packs_scales_and_pins_nothing_that_was_read_ahead(
    small: Served, four: list[str], prompt: list[int], made_ready_by: list[threading.Thread]
) -> None:
    """The steps are the main thread's. Without prefetch it does all of it, with it nothing."""
    is_ahead = small.scheduler.connector.prefetch is not None
    loads = small.runner.lora_manager.adapter_loads
    small.ask([prompt] * 4, four)
    assert small.runner.lora_manager.adapter_loads - loads >= 2  # two of four are in memory
    assert made_ready_by
    in_steps = [thread for thread in made_ready_by if thread is threading.main_thread()]
    assert len(in_steps) == (0 if is_ahead else len(made_ready_by))


def test_what_is_packed_ahead_has_a_step_s_bits(small_engine: Served, four: list[str]) -> None:
    manager, request = small_engine.runner.lora_manager, small_engine.request(four[2])
    in_step = manager._load_adapter(request)
    manager._adapter_manager._create_merged_loras_inplace(in_step)
    ahead = small_engine.scheduler.connector.prefetch._read(request)
    manager._adapter_manager._create_merged_loras_inplace(ahead)  # as the step will
    assert set(ahead.loras) == set(in_step.loras)
    for name, weights in ahead.loras.items():
        other = in_step.loras[name]
        assert weights.scaling == other.scaling and weights.is_packed == other.is_packed
        for part in ("lora_a", "lora_b"):  # a tensor, or one for each slice of a packed layer
            for one, another in zip(getattr(weights, part), getattr(other, part), strict=True):
                assert torch.equal(one, another)
