from __future__ import annotations

from collections.abc import Sequence

import pytest

from eval.agreement import Agreement, agreement
from eval.served import ServedRow
from guard.errors import GuardError
from guard.recipe import Dtype
from tests.eval.conftest import World

Logits = Sequence[float | None]  # None: refused


def compared(
    world: World, peft: Sequence[float], engine: Logits, dtype: str = "float32", **card: float
) -> Agreement:
    world.add_rule(examples=len(peft))
    logits = {f"medical-{number}": logit for number, logit in enumerate(peft)}
    world.add_adapter("medical", "alora", 0, logits, **card)
    rows: list[ServedRow] = []
    for number, logit in enumerate(engine):
        refusal = "too long" if logit is None else None
        rows.append(ServedRow(str(number), f"medical-{number}", "toy", logit, refusal))
    return agreement([(world.trial().by_seed("alora")[0], rows)], dtype)


@pytest.mark.parametrize(
    ("peft", "engine", "dtype", "flips", "beyond"),
    [
        ([0.00005, 5.0], [-0.00005, 5.0], "float32", 1, 0),
        ([5.0] * 100, [5.0] * 99 + [5.01], "float32", 0, 1),
        ([0.3, 5.0] + [1.0] * 98, [-0.2, 5.0] + [1.0] * 98, "bfloat16", 1, 0),
        ([0.2] * 3 + [5.0] * 197, [-0.2] * 2 + [0.2] + [5.0] * 197, "bfloat16", 2, 0),
        ([0.2] * 3 + [5.0] * 97, [-0.2] * 3 + [6.0] * 9 + [5.0] * 88, "int8", 3, 0),
    ],
)
def test_a_few_flips_within_the_noise_and_large_differences_without_one_are_counted(
    world: World,
    peft: Sequence[float],
    engine: Sequence[float],
    dtype: str,
    flips: int,
    beyond: int,
) -> None:
    result = compared(world, peft, engine, dtype)
    assert (result.label_flips, result.beyond_tolerance) == (flips, beyond)


@pytest.mark.parametrize(
    ("peft", "engine", "dtype", "message"),
    [
        (
            *([0.3, 5.0] + [1.0] * 98, [-0.2, 5.0] + [1.0] * 98, "float32"),
            r"1 labels flip beyond the tolerance.*got medical/alora/0 on medical-0: "
            r"PEFT \+0\.3000, engine -0\.2000.*make doctor",
        ),
        (
            *([5.0, -5.0], [6.0, -4.0], "bfloat16"),
            r"2 of 2 logits differ by more.*, at most 1 may; the mean difference is 1 nats",
        ),
        (
            *([5.0] * 100, [5.0] * 98 + [5.6] * 2, "bfloat16"),
            r"bfloat16\): 2 of 100 logits differ by more without a flip, at most 1 may\. Run",
        ),
        (  # a shift of all logits is no noise, however small each
            *([5.0, -5.0] * 50, [5.3, -4.7] * 50, "bfloat16"),
            r"bfloat16\): the mean difference is 0\.3 nats, at most 0\.05 may be\. Run",
        ),
        (
            *([0.2] * 3 + [5.0] * 197, [-0.2] * 3 + [5.0] * 197, "bfloat16"),
            r"bfloat16\): 3 of 200 labels flip, at most 2 may \(got medical/alora/0 on medical-",
        ),
    ],
)
def test_what_noise_does_not_explain_stops_and_names_the_example(
    world: World, peft: Sequence[float], engine: Sequence[float], dtype: Dtype, message: str
) -> None:
    with pytest.raises(GuardError, match=message):
        compared(world, peft, engine, dtype)


@pytest.mark.parametrize(("answered", "refused"), [(0, 1), (0, 2), (1, 199), (197, 3)])
def test_refusing_many_prompts_is_not_agreeing(answered: int, refused: int, world: World) -> None:
    total = answered + refused
    message = rf"refused {refused} of {total} prompts.*got medical-{answered}: too long.*doctor"
    with pytest.raises(GuardError, match=message):
        compared(world, [5.0] * total, [5.0] * answered + [None] * refused, "bfloat16")


def test_a_few_refused_prompts_are_not_compared_and_labels_flip_at_the_card_s_threshold(
    world: World,
) -> None:
    result = compared(world, [1.0, -2.0, 3.0, 4.0, 9.0], [1.0002, -2.0001, 3.0, 4.0, None])
    assert (result.prompts, result.label_flips, result.beyond_tolerance) == (4, 0, 0)
    assert result.max_difference == pytest.approx(0.0002)
    assert result.mean_difference == pytest.approx(0.000075)
    # sigmoid(2.1973) is 0.900007, sigmoid(2.1972) is 0.899998
    card = {"temperature": 1.0, "threshold": 0.9}
    assert compared(world, [2.1973, 5.0], [2.1972, 5.0], **card).label_flips == 1
