from __future__ import annotations

from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.image import imread

from eval.report.picture import looks
from tests.eval.conftest import World
from tests.eval.test_evaluation import evaluated
from tests.eval.test_run import evaluate


def test_the_picture_shows_the_judge_left_of_the_better_adapters(world: World) -> None:
    world.add_rule("medical", examples=10, seeds=(0, 1))
    world.add_rule("legal", examples=10)
    report = evaluate(world)
    pixels = imread(world.runs.report.with_suffix(".png"))[..., :3]
    plot = pixels[100:]  # below the legend

    by_contender = looks(report.evaluations)

    def columns(method: str) -> Any:
        return (abs(plot - to_rgb(by_contender[method].colour)).max(axis=-1) < 0.02).nonzero()[1]

    assert all(len(columns(method)) > 200 for method in ("judge", "lora", "alora"))
    assert columns("judge").mean() + 100 < columns("lora").mean()
    assert columns("judge").mean() + 100 < columns("alora").mean()


def test_no_two_contenders_look_alike(world: World) -> None:
    by_contender = looks([evaluated(world)])
    assert list(by_contender) == ["judge", "bag_of_words", "lora", "alora"]
    assert len({(look.colour, look.marker, look.offset) for look in by_contender.values()}) == 4
    assert by_contender["judge"].label == "judge: base"
    assert sum(look.offset for look in by_contender.values()) == 0
