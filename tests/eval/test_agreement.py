from __future__ import annotations

from collections.abc import Sequence

import pytest

from eval.agreement import agreement
from eval.served import ServedRow
from eval.trial import Contestant
from guard.errors import GuardError
from tests.eval.conftest import World


def contestant(world: World, peft: Sequence[float]) -> Contestant:
    world.add_rule(examples=len(peft))
    world.add_adapter(
        "medical", "alora", 0, {f"medical-{number}": logit for number, logit in enumerate(peft)}
    )
    return world.trial().by_seed("alora")[0]


def rows(engine: Sequence[float | None]) -> list[ServedRow]:
    return [
        ServedRow(
            str(number), f"medical-{number}", "toy", logit, "too long" if logit is None else None
        )
        for number, logit in enumerate(engine)
    ]


def test_differences_are_measured_in_nats(world: World) -> None:
    adapter = contestant(world, [1.0, -2.0, 3.0, 4.0])
    result = agreement([(adapter, rows([1.0002, -2.0001, 3.0, 4.0]))], "float32")
    assert result.prompts == 4
    assert result.max_difference == pytest.approx(0.0002)
    assert result.mean_difference == pytest.approx(0.000075)
    assert result.label_flips == result.beyond_tolerance == 0


def test_a_flip_within_the_noise_is_reported(world: World) -> None:
    adapter = contestant(world, [0.00005, 5.0])
    result = agreement([(adapter, rows([-0.00005, 5.0]))], "float32")
    assert result.label_flips == 1


def test_a_flip_beyond_the_noise_stops_and_names_the_example(world: World) -> None:
    adapter = contestant(world, [0.3, 5.0] + [1.0] * 98)
    engine = [-0.2, 5.0] + [1.0] * 98
    with pytest.raises(
        GuardError,
        match=r"1 labels flip beyond the tolerance.*got medical/alora/0 on medical-0: "
        r"PEFT \+0\.3000, engine -0\.2000.*make doctor",
    ):
        agreement([(adapter, rows(engine))], "float32")
    assert agreement([(adapter, rows(engine))], "bfloat16").label_flips == 1


def test_a_systematic_difference_stops_even_without_a_flip(world: World) -> None:
    adapter = contestant(world, [5.0, -5.0])
    with pytest.raises(
        GuardError,
        match=r"2 of 2 logits differ by more without a flip, at most 1 may; "
        r"the mean difference is 1 nats",
    ):
        agreement([(adapter, rows([6.0, -4.0]))], "bfloat16")


def test_one_large_difference_without_a_flip_is_counted(world: World) -> None:
    adapter = contestant(world, [5.0] * 100)
    result = agreement([(adapter, rows([5.0] * 99 + [5.01]))], "float32")
    assert result.beyond_tolerance == 1


def test_more_large_differences_than_a_few_stop_even_without_a_flip(world: World) -> None:
    adapter = contestant(world, [5.0] * 100)
    with pytest.raises(
        GuardError,
        match=r"bfloat16\): 2 of 100 logits differ by more without a flip, at most 1 may\. Run",
    ):
        agreement([(adapter, rows([5.0] * 98 + [5.6] * 2))], "bfloat16")


def test_a_shift_of_all_logits_is_no_noise_however_small_each(world: World) -> None:
    adapter = contestant(world, [5.0, -5.0] * 50)
    with pytest.raises(
        GuardError,
        match=r"bfloat16\): the mean difference is 0\.3 nats, at most 0\.05 may be\. Run",
    ):
        agreement([(adapter, rows([5.3, -4.7] * 50))], "bfloat16")


def test_more_flips_than_a_few_stop_even_within_the_tolerance(world: World) -> None:
    adapter = contestant(world, [0.2] * 3 + [5.0] * 197)
    two, three = [-0.2] * 2 + [0.2] + [5.0] * 197, [-0.2] * 3 + [5.0] * 197
    assert agreement([(adapter, rows(two))], "bfloat16").label_flips == 2
    with pytest.raises(
        GuardError,
        match=r"bfloat16\): 3 of 200 labels flip, at most 2 may \(got medical/alora/0 on medical-",
    ):
        agreement([(adapter, rows(three))], "bfloat16")


def test_labels_flip_at_the_cards_threshold_not_at_zero(world: World) -> None:
    contestant(world, [2.1973, 5.0])
    world.add_adapter(
        "medical",
        "alora",
        0,
        {"medical-0": 2.1973, "medical-1": 5.0},
        temperature=1.0,
        threshold=0.9,
    )
    adapter = world.trial().by_seed("alora")[0]
    # sigmoid(2.1973) is 0.900007, sigmoid(2.1972) is 0.899998
    assert agreement([(adapter, rows([2.1972, 5.0]))], "float32").label_flips == 1


def test_refused_prompts_are_not_compared(world: World) -> None:
    adapter = contestant(world, [1.0, 2.0])
    assert agreement([(adapter, rows([None, 2.0]))], "float32").prompts == 1


@pytest.mark.parametrize(("compared", "refused"), [(0, 1), (0, 2), (1, 199), (197, 3)])
def test_an_engine_that_refuses_many_prompts_is_not_one_that_agrees(
    compared: int, refused: int, world: World
) -> None:
    adapter = contestant(world, [5.0] * (compared + refused))
    with pytest.raises(
        GuardError,
        match=rf"refused {refused} of {compared + refused} prompts.*"
        rf"got medical-{compared}: too long.*make doctor",
    ):
        agreement([(adapter, rows([5.0] * compared + [None] * refused))], "bfloat16")


def test_an_engine_may_refuse_a_few_prompts(world: World) -> None:
    adapter = contestant(world, [5.0] * 200)
    assert agreement([(adapter, rows([5.0] * 198 + [None] * 2))], "bfloat16").prompts == 198
