"""The coldest adapter is evicted: by itself, and in an engine with few slots, against PEFT."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from vllm.lora.ops.triton_ops import utils
from vllm_alora.weights import slots
from vllm_alora.weights.slots import HALF_LIFE, Heat, forget_pointers

from guard.prompt.decoder import PromptBuilder
from tests.serve.adapters import save_random_adapter
from tests.serve.served import Served
from tests.serve.vllm_alora.checked_engine import assert_peft, prompt_for

pytestmark = pytest.mark.slow

SLOTS, KEPT, ADAPTERS = 4, 6, 8


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


def test_what_was_popular_long_ago_is_evicted() -> None:
    heat = Heat()
    for _ in range(40):
        heat.begin([1])
    for _ in range(8 * HALF_LIFE):
        heat.begin([])
    for _ in range(3):
        heat.begin([2])
    assert heat.coldest([1, 2]) == 1
    for _ in range(30 * HALF_LIFE):
        heat.begin([3])
    assert set(heat._counted) == {3}  # and is forgotten in the end


def test_an_adapter_that_the_step_needs_keeps_its_slot() -> None:
    heat = Heat()
    for _ in range(3):
        heat.begin([1])
    heat.begin([2])
    assert heat.coldest([1, 2]) == 1


class ToyCache(dict[int, str]):
    pinned_items: frozenset[int] = frozenset()


def test_host_memory_gives_up_what_the_step_does_not_need_even_from_its_slot() -> None:
    """Adapters 1 and 2 have slots, 3 has none; the step needs 3 and 4, and 4 has to come in."""
    manager = SimpleNamespace(
        _registered_adapters=ToyCache({1: "", 2: "", 3: ""}), _active_adapters={1: "", 2: ""}
    )
    slots.heat_of(manager).begin([1])
    slots.heat_of(manager).begin([3, 4])
    assert slots.remove_oldest_adapter.wrapper(lambda *_: False, manager)
    assert set(manager._registered_adapters) == {1, 3}
    slots.heat_of(manager).begin([1])
    assert slots.remove_oldest_adapter.wrapper(lambda *_: False, manager)
    assert set(manager._registered_adapters) == {1}  # without a slot, and not needed


class Slots:
    """An engine with four slots and memory for six of its eight adapters."""

    def __init__(self, served: Served, folders: list[str], invocation: Sequence[int]) -> None:
        self.served = served
        self.folders = folders
        self.manager = served.runner.lora_manager._adapter_manager
        self._invocation = invocation

    def ask(self, numbers: Sequence[int], *, seed: int | None = None) -> int:
        """Ask these at once, against PEFT, of one prompt or each of its own; the swap-ins."""
        before = getattr(self.manager, "swap_ins", 0)  # there from the first one on
        prompts = []
        for number in numbers:
            own = 40 + 3 * number if seed is None else 40
            own_seed = number if seed is None else seed
            prompts.append(prompt_for(self._invocation, before=own, after=9, seed=own_seed))
        folders = [self.folders[number] for number in numbers]
        assert_peft(self.served.ask(prompts, folders), prompts, folders)
        return int(getattr(self.manager, "swap_ins", 0) - before)

    def adapter_id(self, number: int) -> int:
        return int(self.served.request(self.folders[number]).lora_int_id)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, prompts: PromptBuilder) -> Iterator[Slots]:
    root, invocation = tmp_path_factory.mktemp("many"), prompts.invocation("a rule")
    folders = []
    for seed, rank in enumerate((16, 8, 4, 16) * 2):
        folder = root / str(seed)
        folders.append(save_random_adapter(folder, seed=seed, rank=rank, invocation=invocation))
    engine = Served.start(max_loras=SLOTS, max_cpu_loras=KEPT, kv_cache_memory_bytes=2**26)
    yield Slots(engine, folders, invocation)
    engine.close()


def test_more_adapters_than_slots_and_memory_answer_as_peft_does(small: Slots) -> None:
    """In waves, in another order each time: what comes back was read again, with its rank."""
    rng = random.Random(1)
    for _ in range(3):
        small.ask(rng.sample(range(ADAPTERS), ADAPTERS))
    assert len(small.manager._active_adapters) == SLOTS
    assert len(small.manager._registered_adapters) == KEPT


def test_a_step_copies_only_what_has_no_slot(small: Slots) -> None:
    small.manager.adapter_heat = Heat()  # as if nothing had been asked before
    for _ in range(2):
        # In memory from here on: one that is read beside the steps comes a step later.
        small.ask(range(6), seed=3)
    small.ask(range(4), seed=3)
    for first in (1, 2):
        assert small.ask(range(first, first + 4), seed=3) == 1


def test_an_adapter_not_swapped_in_is_copied_anew(small: Slots, monkeypatch: MonkeyPatch) -> None:
    """Half of it is in a slot that held another one."""
    small.ask(range(KEPT), seed=5)
    manager = small.manager
    cold = [
        number for number in range(KEPT) if small.adapter_id(number) not in manager._active_adapters
    ]
    adapter_id = small.adapter_id(cold[0])
    *_, last_layer = manager.modules.values()
    with monkeypatch.context() as patch:
        patch.setattr(last_layer, "set_lora", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            manager.activate_adapter(adapter_id)
    assert adapter_id not in manager._active_adapters
    assert adapter_id not in manager.lora_index_to_id
    small.ask([cold[0]], seed=5)


def test_a_pinned_adapter_stays(small: Slots) -> None:
    small.ask([0], seed=4)
    small.served.llm.llm_engine.pin_lora(small.adapter_id(0))
    for _ in range(3):
        for number in range(1, ADAPTERS):
            small.ask([number], seed=4)
    assert small.ask([0], seed=4) == 0


def manager(*layers: Any) -> Any:
    modules = {str(number): layer for number, layer in enumerate(layers)}
    return SimpleNamespace(_adapter_manager=SimpleNamespace(modules=modules))


def layer(slices: int) -> Any:
    """A layer with slots for two adapters of rank 4, for one projection or several packed."""
    return SimpleNamespace(
        lora_a_stacked=tuple(torch.zeros(2, 1, 4, 8) for _ in range(slices)),
        lora_b_stacked=tuple(torch.zeros(2, 1, 8, 4) for _ in range(slices)),
    )


def test_the_slots_of_a_closed_engine_are_forgotten_and_those_of_another_stay() -> None:
    tables = (utils._LORA_A_PTR_DICT, utils._LORA_B_PTR_DICT)
    assert not any(tables)
    closed, other = [layer(1), layer(3)], [layer(1)]
    for each in (*closed, *other):
        utils._get_lora_a_ptr(list(each.lora_a_stacked), torch.device("cpu"))
        utils._get_lora_b_ptr(list(each.lora_b_stacked), 0, torch.device("cpu"))
    assert [len(table) for table in tables] == [3, 3]
    forget_pointers(manager(*closed))
    (a,), (b,) = tables
    assert a == (other[0].lora_a_stacked[0].data_ptr(),)
    assert b == (other[0].lora_b_stacked[0].data_ptr(),)
    forget_pointers(manager(*other))
    assert not any(tables)
