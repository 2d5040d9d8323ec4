"""The coldest adapter is evicted: the order on its own, and in a real engine with fewer slots than
adapters, against PEFT.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_alora.weights import slots
from vllm_alora.weights.slots import HALF_LIFE, Heat

from guard.prompt.decoder import PromptBuilder
from tests.serve.adapters import save_random_adapter
from tests.serve.served import Served
from tests.serve.vllm_alora.test_parity import assert_peft, prompt_for

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
    assert swap_ins(steps, 32) < 0.6 * len(
        steps
    )  # the least recently used would always be the next one asked
    assert swap_ins(steps, 64) == 64


def test_a_rare_adapter_evicts_no_popular_one() -> None:
    rng = random.Random(0)
    popular = [[rng.randrange(3)] for _ in range(200)]
    rare = [[10 + number] for number in range(50)]
    assert swap_ins(
        [*popular, *itertools.chain.from_iterable(zip(rare, popular, strict=False))], 4
    ) == 3 + len(rare)


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


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    engine = Served.start(max_loras=SLOTS, max_cpu_loras=KEPT, kv_cache_memory_bytes=2**26)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, prompts: PromptBuilder) -> list[str]:
    root: Path = tmp_path_factory.mktemp("many")
    ranks = (16, 8, 4, 16)
    return [
        save_random_adapter(
            root / str(number),
            seed=number,
            rank=ranks[number % 4],
            invocation=prompts.invocation("a rule"),
        )
        for number in range(ADAPTERS)
    ]


def filled(engine: Served) -> int:
    return engine.runner.lora_manager._adapter_manager.swap_ins


def test_more_adapters_than_slots_and_than_fit_into_memory_answer_as_peft_does(
    small: Served, many: list[str], prompts: PromptBuilder
) -> None:
    """All at once, in waves, in another order each time: what comes back was read again, and its
    rank with it.
    """
    rng = random.Random(1)
    asked = [
        prompt_for(prompts.invocation("a rule"), before=40 + 3 * number, after=9, seed=number)
        for number in range(ADAPTERS)
    ]
    for _ in range(3):
        order = rng.sample(range(ADAPTERS), ADAPTERS)
        answers = small.ask([asked[number] for number in order], [many[number] for number in order])
        assert_peft(
            answers, [asked[number] for number in order], [many[number] for number in order]
        )
    manager = small.runner.lora_manager._adapter_manager
    assert len(manager._active_adapters) == SLOTS
    assert len(manager._registered_adapters) == KEPT


def test_a_step_copies_only_what_has_no_slot(
    small: Served, many: list[str], prompts: PromptBuilder
) -> None:
    prompt = prompt_for(prompts.invocation("a rule"), before=40, after=9, seed=3)
    small.runner.lora_manager._adapter_manager.adapter_heat = (
        Heat()
    )  # as if nothing had been asked before
    for _ in range(2):
        small.ask(
            [prompt] * 6, many[:6]
        )  # in memory from here on: one that is read beside the steps comes a step later
    small.ask([prompt] * 4, many[:4])
    for first, second in itertools.pairwise((many[:4], many[1:5], many[2:6])):
        before = filled(small)
        answers = small.ask([prompt] * 4, second)
        assert filled(small) - before == len(set(second) - set(first))
        assert_peft(answers, [prompt] * 4, second)


def test_an_adapter_whose_swap_in_failed_is_copied_anew(
    small: Served, many: list[str], prompts: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is in a slot that held another one."""
    prompt = prompt_for(prompts.invocation("a rule"), before=40, after=9, seed=5)
    small.ask([prompt] * KEPT, many[:KEPT])
    manager = small.runner.lora_manager._adapter_manager
    folder = next(
        folder
        for folder in many[:KEPT]
        if small.request(folder).lora_int_id not in manager._active_adapters
    )
    adapter_id = small.request(folder).lora_int_id
    *_, last_layer = manager.modules.values()
    with monkeypatch.context() as patch:
        patch.setattr(last_layer, "set_lora", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            manager.activate_adapter(adapter_id)
    assert adapter_id not in manager._active_adapters
    assert adapter_id not in manager.lora_index_to_id
    assert_peft([small.ask_one(prompt, folder)], [prompt], [folder])


def test_a_pinned_adapter_stays(small: Served, many: list[str], prompts: PromptBuilder) -> None:
    prompt = prompt_for(prompts.invocation("a rule"), before=40, after=9, seed=4)
    small.ask_one(prompt, many[0])
    small.llm.llm_engine.pin_lora(small.request(many[0]).lora_int_id)
    for _ in range(3):
        for folder in many[1:]:
            small.ask_one(prompt, folder)
    before = filled(small)
    answer = small.ask_one(prompt, many[0])
    assert filled(small) == before
    assert_peft([answer], [prompt], [many[0]])
