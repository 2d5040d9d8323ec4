"""From kept logits to a report: which figure belongs to which method, size and origin, or an error
that says what to run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from eval.answers import BAG_OF_WORDS
from eval.study import StudyReport, report_study, shared_test_rows, study_logits
from guard.conversation.example import Example, read_examples, write_examples
from guard.errors import GuardError
from guard.files.yaml_file import validate
from guard.rule import Rule, load_rule
from guard.study import Study, StudyPoint, point_runs
from guard.weights.predictions import write_predictions
from tests.eval.conftest import RULE, World, words_rows

NAME = "medical"


def rows_of(rows: int = 24) -> list[Example]:
    """Test rows of alternating labels, two of a group."""
    made = []
    for number, row in enumerate(words_rows(NAME, "test", rows)):
        made.append(replace(row, id=f"real/{number}", group=f"real/g{number // 2}"))
    return made


@dataclass
class StudyWorld:
    """Where it lies, on which recipe, with which test rows."""

    world: World
    folder: Path
    study: Study

    @property
    def rule(self) -> Rule:
        return load_rule(NAME, self.world.rules)

    def write(self, wrong: dict[str, int]) -> None:
        """Every point's data and weights; of each method so many rows rank as the other label,
        one fewer with the next size.
        """
        self.study.save(self.folder)
        rows = rows_of()
        for point in self.study.points:
            self.world.runs = point_runs(self.folder, point)
            self.world.write_test(NAME, rows, seeds=[point.seed])
            for method in self.world.recipe.methods:
                left = wrong[method] - self.study.sizes.index(point.rows)
                self.world.add_adapter(NAME, method, point.seed, _logits(rows, left))


def _logits(rows: Sequence[Example], wrong: int) -> dict[str, float]:
    """Logits that differ by row; the first `wrong` violating rows stand below all others."""
    logits = {}
    for number, row in enumerate(rows):
        logit = (2 * row.label - 1) + number / 1000
        if row.label and number < 2 * wrong:
            logit = -5.0 - number
        logits[row.id] = logit
    return logits


def study_world(tmp_path: Path) -> StudyWorld:
    world = World(tmp_path)
    (world.rules / f"{NAME}.yaml").write_text(RULE.format(name=NAME))
    points = tuple(StudyPoint(rows=rows, seed=seed) for rows in (20, 40) for seed in (0, 1))
    study = Study(rule=NAME, data="generator+/logs/rows.csv", points=points)
    made = StudyWorld(world, tmp_path / "runs" / "curve" / NAME, study)
    made.write({"lora": 2, "alora": 6})
    return made


@pytest.fixture
def curve(tmp_path: Path) -> StudyWorld:
    return study_world(tmp_path)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyWorld, StudyReport]:
    made = study_world(tmp_path_factory.mktemp("curve"))
    return made, report_study(made.folder, [made.world.recipe], made.world.rules)


def test_every_method_and_size_is_measured(reported: tuple[StudyWorld, StudyReport]) -> None:
    made, report = reported
    assert (report.tested, report.violating) == (24, 12)
    for method, wrong in (("lora", 2), ("alora", 6)):
        for step, rows in enumerate((20, 40)):
            # Each of the wrong rows stands below all allowed ones, the others above.
            right = (12 - (wrong - step)) / 12
            assert report.by_place[rows, method, None].mean == pytest.approx(right)
            assert report.by_place[rows, method, None].by_seed == pytest.approx((right, right))
    assert report.by_place[20, "bag_of_words", None].mean == 1.0
    kept = made.folder / "toy.json"
    assert validate(json.loads(kept.read_text()), StudyReport, where=kept) == report
    text = " ".join(kept.with_suffix(".md").read_text().split())
    assert "medical on toy, generator+rows.csv." in text and "24 (12 violate)" in text
    assert "own rows, about a fifth of them validation, beside generated ones | 20 | 40 |" in text
    assert "| LoRA | 0.833 [" in text
    pairs = {(it.method, it.minus) for it in report.figures if it.minus is not None}
    assert pairs == {("lora", "bag_of_words"), ("alora", "bag_of_words"), ("alora", "lora")}
    difference = report.by_place[20, "alora", "lora"]
    assert difference.mean == pytest.approx(-4 / 12)
    assert str(difference).startswith("**-0.333 [")
    no_difference = difference.model_copy(update={"ci95": (-0.6, 0.1)})
    assert str(no_difference) == "-0.333 [-0.600, +0.100]"


def test_several_bases_stand_side_by_side(curve: StudyWorld) -> None:
    toy = curve.world.recipe
    curve.world.recipe = toy.only("lora").model_copy(update={"name": "second"})
    curve.write({"lora": 4})
    report = report_study(curve.folder, [toy, curve.world.recipe], curve.world.rules)
    assert report.methods == ["bag_of_words", "toy/lora", "toy/alora", "second/lora"]
    assert report.by_place[20, "toy/lora", None].mean == pytest.approx(10 / 12)
    assert report.by_place[20, "second/lora", None].mean == pytest.approx(8 / 12)
    text = (curve.folder / "toy_second.md").read_text()
    assert "on toy and second" in text and "second LoRA minus toy LoRA" in text


def test_no_rows_are_what_the_reader_answers(curve: StudyWorld) -> None:
    """Of what starts as it: the others have no figure there."""
    toy = curve.world.recipe
    started = toy.methods["alora"].model_copy(update={"start": "reader"})
    recipe = toy.model_copy(update={"methods": toy.methods | {"alora": started}})
    curve.world.recipe, rows = recipe, rows_of()
    curve.write({"lora": 2, "alora": 2})
    for point in curve.study.points:
        folder = point_runs(curve.folder, point).adapter("toy", NAME, "alora", point.seed)
        kept = [(key, "test", logit) for key, logit in _logits(rows, 2).items()]
        kept += [(key, "day zero test", logit) for key, logit in _logits(rows, 6).items()]
        write_predictions(folder, kept)
    zero = tuple(StudyPoint(rows=0, seed=seed) for seed in (0, 1))
    for point in zero:
        write_examples(point_runs(curve.folder, point).data(NAME) / "test.jsonl", rows)
    points = (*zero, *curve.study.points)
    curve.study.model_copy(update={"data": "rows.csv", "points": points}).save(curve.folder)
    report = report_study(curve.folder, [recipe], curve.world.rules)
    assert report.by_place[0, "alora", None].mean == pytest.approx(6 / 12)
    assert report.by_place[20, "alora", None].mean == pytest.approx(10 / 12)
    assert report.methods == ["bag_of_words", "lora", "alora"]
    text = " ".join(report.as_markdown().split())
    assert "| LoRA | - | 0." in text and "| aLoRA | 0.500 [" in text


def logits_of(made: StudyWorld) -> dict[tuple[int, str], np.ndarray]:
    return study_logits(made.folder, made.study, [made.world.recipe], made.rule)


def test_the_bag_of_words_is_of_the_point_s_own_rows(curve: StudyWorld) -> None:
    """At one point the training rows say the opposite of what they say at the others."""
    opposite = point_runs(curve.folder, curve.study.points[0])
    for split in ("train", "validation"):
        turned = [replace(row, label=1 - row.label) for row in words_rows(NAME, split)]
        write_examples(opposite.data(NAME) / f"{split}.jsonl", turned)
    curve.world.runs = opposite
    tests = shared_test_rows(curve.folder, curve.study)
    for method in curve.world.recipe.methods:
        curve.world.add_adapter(NAME, method, 0, {row.id: 0.0 for row in tests})
    logits = logits_of(curve)
    is_violating = np.array([row.label == 1 for row in tests])
    turned_round, straight = logits[20, BAG_OF_WORDS]
    assert turned_round[is_violating].max() < turned_round[~is_violating].min()
    assert straight[is_violating].min() > straight[~is_violating].max()


def test_weights_of_another_rule_recipe_or_data_are_refused(curve: StudyWorld) -> None:
    """What else is refused: tests/eval/test_trial.py. Thresholds are balanced, whatever rate the
    rule wants.
    """
    file = curve.world.rules / f"{NAME}.yaml"
    file.write_text(file.read_text() + "max_fpr: 0.1\n")
    assert curve.rule.max_fpr == 0.1 and logits_of(curve)
    curve.world.runs = point_runs(curve.folder, curve.study.points[-1])
    for field, value in (("rule_hash", "other"), ("recipe", {"dtype": "bfloat16"})):
        curve.world.add_adapter(NAME, "lora", 1, {}, **{"max_fpr": None, field: value})
        with pytest.raises(GuardError, match=rf"weights' {field} is not.*Run the study's command"):
            logits_of(curve)
    train = curve.world.runs.data(NAME) / "train.jsonl"
    write_examples(train, read_examples(train)[:-2])
    with pytest.raises(GuardError, match=r"weights' data_hash is not.*again"):
        logits_of(curve)
    test = train.with_name("test.jsonl")
    write_examples(test, read_examples(test)[:-1])
    with pytest.raises(GuardError, match="different test rows"):
        shared_test_rows(curve.folder, curve.study)


def test_a_missing_prediction_or_method_is_named(curve: StudyWorld) -> None:
    folder = curve.world.runs.adapter("toy", NAME, "lora", 1)
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    (folder / "predictions.jsonl").write_text("\n".join(lines[1:]))
    with pytest.raises(GuardError, match=r"no reference prediction.*real/0.*study's command"):
        logits_of(curve)
    (folder / "card.json").unlink()
    with pytest.raises(GuardError, match=r"not finished weights.*study's command"):
        report_study(curve.folder, [curve.world.recipe], curve.world.rules)
    assert not (curve.folder / "toy.json").exists()
