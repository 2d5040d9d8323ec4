"""A worker computes with the weights the request names, and with all of them. The coldest adapter
is evicted, and adapters are read beside the steps: each by itself, and in an engine with few slots,
against PEFT.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from vllm import SamplingParams
from vllm.lora.ops.triton_ops import utils
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.utils import PPMissingLayer
from vllm_alora.adapter import AdapterError, read_adapter
from vllm_alora.handover import ActivatedRequest
from vllm_alora.weights import slots
from vllm_alora.weights.placed import unplaced
from vllm_alora.weights.prefetch import PREFETCH, Prefetch, connect
from vllm_alora.weights.slots import HALF_LIFE, Heat, forget_pointers

from guard.prompt.decoder import PromptBuilder
from tests.serve.adapters import save_random_adapter
from tests.serve.served import Served
from tests.serve.vllm_alora.checked_engine import assert_peft, prompt_for
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SLOTS, KEPT, ADAPTERS = 4, 6, 8
SLOW_S = 0.4
BROKEN = 13


def test_other_files_than_the_request_was_checked_with_and_loading_in_place_are_refused(
    served: Served, adapters: dict[str, str]
) -> None:
    content = read_adapter(adapters["first"]).content
    changed = ActivatedRequest("rule", 901, adapters["lora"], content=content)
    with pytest.raises(AdapterError, match="files changed after its request was checked"):
        served.runner.lora_manager.add_adapter(changed)
    with pytest.raises(AdapterError, match="load_inplace"):  # over weights in use
        in_place = LoRARequest("rule", 901, adapters["lora"], load_inplace=True)
        served.runner.lora_manager.add_adapter(in_place)


@pytest.mark.parametrize("pools", [True, False])
def test_layers_have_a_place_plain_packed_and_of_other_stages(*, pools: bool) -> None:
    """Without "model." where the model pools, and only there: vLLM leaves it out elsewhere, and the
    base would answer.
    """
    layer = torch.nn.Linear(1, 1)
    manager: Any = SimpleNamespace(
        modules={"model.layers.0.qkv_proj": layer, "model.layers.0.o_proj": layer},
        packed_modules={"model.layers.0.qkv_proj": ["model.layers.0.q_proj"]},
        model=torch.nn.ModuleDict({"mine": layer, "elsewhere": PPMissingLayer()}),
        is_pooling_model=pools,
    )
    short = ["layers.0.q_proj", "layers.0.o_proj", "layers.0.qkv_proj"]
    assert unplaced([*(f"model.{name}" for name in short), "elsewhere.q_proj"], manager) == []
    assert unplaced(short, manager) == ([] if pools else short)
    lost = ["model.layers.0.up_proj", "mine.q_proj"]
    assert unplaced(lost, manager) == lost


def test_on_a_cpu_no_other_layers_are_served(adapters: dict[str, str], tmp_path: Path) -> None:
    """By their class, whatever they are called; and the others of the same engine are served."""
    settings = {"max_loras": 1, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    settings |= {"kv_cache_memory_bytes": 2**26}
    with Served.start(**settings, lora_target_modules=None) as engine:
        output = save_random_adapter(tmp_path / "output", seed=1, targets=["lm_head", "q_proj"])
        with pytest.raises(AdapterError, match=r"is served \(got lm_head\)"):
            engine.llm.llm_engine.add_lora(engine.request(output))
        prompt, lora = list(range(30, 70)), adapters["lora"]
        assert_peft([engine.ask_one(prompt, lora)], [prompt], [lora])


def swap_ins(steps: Sequence[Sequence[int]], slots: int) -> int:
    """How often an adapter is copied into a slot when these steps are run with so many slots."""
    heat, active, count = Heat(), list[int](), 0
    for step in steps:
        heat.begin(step)
        for adapter in sorted(step, key=lambda adapter: adapter not in active):
            if adapter not in active:
                if len(active) >= slots:
                    active.remove(heat.coldest(active))
                heat.swap_in(adapter)
                active.append(adapter)
                count += 1
    return count


def test_of_adapters_asked_round_robin_most_keep_their_slot() -> None:
    steps = [[number % 64] for number in range(64 * 20)]
    # The least recently used would always be the next one asked.
    assert swap_ins(steps, 32) < 0.6 * len(steps)
    assert swap_ins(steps, 64) == 64


def test_a_rare_adapter_evicts_no_popular_one() -> None:
    rng = random.Random(0)
    popular = [[rng.randrange(3)] for _ in range(200)]
    rare = [[10 + number] for number in range(50)]
    in_turn = itertools.chain.from_iterable(zip(rare, popular, strict=False))
    assert swap_ins([*popular, *in_turn], 4) == 3 + len(rare)


def test_what_was_popular_long_ago_is_evicted_unless_the_step_needs_it() -> None:
    heat = Heat()
    for _ in range(40):
        heat.begin([1])
    for _ in range(8 * HALF_LIFE):
        heat.begin([])
    for _ in range(3):
        heat.begin([2])
    assert heat.coldest([1, 2]) == 1
    heat.begin([1])
    assert heat.coldest([1, 2]) == 2
    for _ in range(30 * HALF_LIFE):
        heat.begin([3])
    assert set(heat._counted) == {3}  # and is forgotten in the end


class ToyCache(dict[int, str]):
    pinned_items: frozenset[int] = frozenset()


def test_host_memory_gives_up_what_the_step_does_not_need_even_from_its_slot() -> None:
    """Adapters 1 and 2 have slots, 3 has none; the step needs 3 and 4, and 4 has to come in."""
    manager = SimpleNamespace(
        _registered_adapters=ToyCache({1: "", 2: "", 3: ""}), _active_adapters={1: "", 2: ""}
    )
    slots.heat_of(manager).begin([1])
    for needed, kept in (([3, 4], {1, 3}), ([1], {1})):  # then 3, without a slot and not needed
        slots.heat_of(manager).begin(needed)
        assert slots.remove_oldest_adapter.wrapper(lambda *_: False, manager)
        assert set(manager._registered_adapters) == kept


class ToyManager:
    """Reads adapters when it is let; a `BROKEN` one raises."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.read: list[int] = []
        self.packed: list[str] = []
        self._adapter_manager = SimpleNamespace(
            _registered_adapters={1: "in memory"}, _create_merged_loras_inplace=self.packed.append
        )
        self.prefetch = Prefetch(self, max_ahead=2)

    def _load_adapter(self, lora_request: Any) -> str:
        # The reading thread must not wait for itself.
        assert self.prefetch.take(lora_request.lora_int_id) is None
        assert self.go.wait(10)
        self.read.append(lora_request.lora_int_id)
        if lora_request.lora_int_id == BROKEN:
            raise OSError("broken")
        return f"adapter {lora_request.lora_int_id}"

    def is_ready(self, *numbers: int) -> list[bool]:
        asked = [SimpleNamespace(lora_int_id=number) for number in numbers]
        return [self.prefetch.is_ready(request) for request in asked]

    def until_ready(self, *numbers: int) -> None:
        self.go.set()
        wait_until(lambda: all(self.is_ready(*numbers)), 10)


def test_what_is_in_memory_is_ready_and_the_rest_is_read_once_and_in_order() -> None:
    manager = ToyManager()
    assert manager.is_ready(1, 5, 4, 5, 4) == [True, *[False] * 4]
    manager.until_ready(5, 4)
    assert manager.read == [5, 4]
    taken = [manager.prefetch.take(number) for number in (4, 4, 5)]
    assert taken == ["adapter 4", None, "adapter 5"]
    assert manager.packed == ["adapter 5", "adapter 4"]
    manager.prefetch.wait()  # which ends when nothing is read
    manager.until_ready(BROKEN)
    with pytest.raises(OSError, match="broken"):
        manager.prefetch.take(BROKEN)
    manager.until_ready(4)


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


def test_an_engine_that_is_to_read_none_ahead_has_no_prefetch() -> None:
    for ahead in (0, 3):
        runner = SimpleNamespace(lora_manager=SimpleNamespace(prefetch=None))
        driver = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        core: Any = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=driver),
            scheduler=SimpleNamespace(connector=SimpleNamespace(prefetch=None)),
            vllm_config=SimpleNamespace(additional_config={PREFETCH: ahead}),
        )
        connect(core)
        assert (core.scheduler.connector.prefetch is None) == (ahead == 0)
        assert runner.lora_manager.prefetch is core.scheduler.connector.prefetch


class FewSlots:
    """An engine with four slots and memory for six of its eight adapters."""

    def __init__(self, served: Served, folders: list[str], invocation: Sequence[int]) -> None:
        self.served = served
        self.folders = folders
        self.invocation = invocation
        self.manager = served.runner.lora_manager._adapter_manager

    def ask(self, numbers: Sequence[int], *, seed: int | None = None) -> int:
        """Ask these at once, against PEFT, of one prompt or each of its own; the swap-ins."""
        before = getattr(self.manager, "swap_ins", 0)  # there from the first one on
        prompts = []
        for number in numbers:
            own = (40 + 3 * number, number) if seed is None else (40, seed)
            prompts.append(prompt_for(self.invocation, before=own[0], after=9, seed=own[1]))
        folders = [self.folders[number] for number in numbers]
        assert_peft(self.served.ask(prompts, folders), prompts, folders)
        return int(getattr(self.manager, "swap_ins", 0) - before)

    def adapter_id(self, number: int) -> int:
        return int(self.served.request(self.folders[number]).lora_int_id)

    def without(self, adapters: Any) -> list[int]:
        """The numbers of the adapters that are not among these, vLLM's."""
        return [number for number in range(ADAPTERS) if self.adapter_id(number) not in adapters]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, prompts: PromptBuilder) -> Iterator[FewSlots]:
    root, invocation = tmp_path_factory.mktemp("many"), prompts.invocation("a rule")
    folders = []
    for seed, rank in enumerate((16, 8, 4, 16) * 2):
        folder = root / str(seed)
        folders.append(save_random_adapter(folder, seed=seed, rank=rank, invocation=invocation))
    settings = {"max_loras": SLOTS, "max_cpu_loras": KEPT, "kv_cache_memory_bytes": 2**26}
    with Served.start(**settings) as engine:
        connect(engine.core)
        yield FewSlots(engine, folders, invocation)


@pytest.fixture(params=[True, False], ids=["read ahead", "read in the step"])
def is_ahead(request: pytest.FixtureRequest, few: FewSlots, monkeypatch: MonkeyPatch) -> bool:
    """Whether the engine reads adapters ahead."""
    if not request.param:
        monkeypatch.setattr(few.served.scheduler.connector, "prefetch", None)
        monkeypatch.setattr(few.served.runner.lora_manager, "prefetch", None)
    return bool(request.param)


@pytest.mark.usefixtures("is_ahead")
def test_more_adapters_than_slots_and_memory_answer_as_peft_does(few: FewSlots) -> None:
    """In waves, in another order each time: what comes back was read again, with its rank."""
    rng = random.Random(1)
    for _ in range(3):
        few.ask(rng.sample(range(ADAPTERS), ADAPTERS))
    assert len(few.manager._active_adapters) == SLOTS
    assert len(few.manager._registered_adapters) == KEPT


def test_nobody_waits_for_others_adapters(few: FewSlots, *, is_ahead: bool) -> None:
    """A cold adapter takes long to read: if it is read ahead, others are answered meanwhile."""
    few.ask(range(2))
    manager, engine = few.served.runner.lora_manager, few.served.llm.llm_engine
    numbers = {"warm 0": 0, "warm 1": 1, "cold": few.without(few.manager._registered_adapters)[0]}
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    answered: set[str] = set()
    warm_answered = threading.Event()
    were_answered: list[bool] = []  # those in memory, before each adapter that was read

    def read_slowly(request: Any) -> Any:
        were_answered.append(warm_answered.wait(30 if is_ahead else SLOW_S))
        return type(manager)._load_adapter(manager, request)

    manager._load_adapter = read_slowly
    try:
        for name in ("cold", "warm 0", "warm 1"):
            inputs = {"prompt_token_ids": prompt_for(few.invocation, before=40, after=9, seed=3)}
            lora = few.served.request(few.folders[numbers[name]])
            engine.add_request(name, inputs, params, lora_request=lora)
        while engine.has_unfinished_requests():
            answered |= {output.request_id for output in engine.step() if output.finished}
            if {"warm 0", "warm 1"} <= answered:
                warm_answered.set()
    finally:
        del manager._load_adapter
    assert were_answered[0] == is_ahead and "cold" in answered


def test_an_adapter_not_swapped_in_is_copied_anew(few: FewSlots, monkeypatch: MonkeyPatch) -> None:
    """Half of it is in a slot that held another one."""
    few.ask(range(KEPT), seed=5)
    manager = few.manager
    without_slot = few.without(manager._active_adapters)
    kept = [number for number in without_slot if few.adapter_id(number) in manager.list_adapters()]
    (cold, *_) = kept
    *_, last_layer = manager.modules.values()
    with monkeypatch.context() as patch:
        patch.setattr(last_layer, "set_lora", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            manager.activate_adapter(few.adapter_id(cold))
    assert few.adapter_id(cold) not in manager._active_adapters
    assert few.adapter_id(cold) not in manager.lora_index_to_id
    few.ask([cold], seed=5)


def test_a_pinned_adapter_stays(few: FewSlots) -> None:
    few.ask([0], seed=4)
    few.served.llm.llm_engine.pin_lora(few.adapter_id(0))
    for others in [[1, 2, 3], [4, 5, 6], [7, 1, 2]] * 2:  # a slot for each, beside the pinned one's
        few.ask(others, seed=4)
    assert few.ask([0], seed=4) == 0


def layer(slices: int) -> Any:
    """A layer with slots for two adapters of rank 4, for one projection or several packed."""
    return SimpleNamespace(
        lora_a_stacked=tuple(torch.zeros(2, 1, 4, 8) for _ in range(slices)),
        lora_b_stacked=tuple(torch.zeros(2, 1, 8, 4) for _ in range(slices)),
    )


def test_the_slots_of_a_closed_engine_are_forgotten_and_those_of_another_stay() -> None:
    tables = (utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT)
    assert not any(tables)
    closed, other = {"0": layer(1), "1": layer(3)}, {"0": layer(1)}
    for adapted in (*closed.values(), *other.values()):
        utils._get_lora_a_ptr(list(adapted.lora_a_stacked), torch.device("cpu"))
        utils._get_lora_b_ptr(list(adapted.lora_b_stacked), 0, torch.device("cpu"))
    for modules, left in ((closed, 1), (other, 0)):
        manager = SimpleNamespace(_adapter_manager=SimpleNamespace(modules=modules))
        forget_pointers(manager)
        assert [len(table) for table in tables] == [left, left]
        if left:
            (address,) = tables[0]
            assert address == (other["0"].lora_a_stacked[0].data_ptr(),)
