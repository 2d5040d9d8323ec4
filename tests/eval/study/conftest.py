"""A study on disk: two points of one rule with kept logits, as the training stage leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from guard.conversation.example import Example
from guard.rule import Rule, load_rule
from guard.study import ORIGIN, Origin, Study, StudyKind, StudyPoint, point_runs
from tests.eval.conftest import RULE, World, words_rows

NAME = "medical"


def tested(origin: Origin, rows: int = 24) -> list[Example]:
    """Test rows of alternating labels, two of a group."""
    made = []
    for number, row in enumerate(words_rows(NAME, "test", rows)):
        places = {"id": f"{origin}/{number}", "group": f"{origin}/g{number // 2}"}
        made.append(replace(row, meta={ORIGIN: origin}, **places))
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
        """Every point's data and weights; of each method so many real rows rank as the other
        label, one fewer with the next size.
        """
        self.study.save(self.folder)
        rows = tested("real")
        if self.study.kind == "transfer":
            rows += tested("generated")
        for point in self.study.points:
            self.world.runs = point_runs(self.folder, point)
            self.world.write_test(NAME, rows, seeds=[point.seed])
            for method in self.world.recipe.methods:
                left = wrong[method] - self.study.sizes.index(point.rows)
                self.world.add_adapter(NAME, method, point.seed, _logits(rows, left))


def _logits(rows: Sequence[Example], wrong: int) -> dict[str, float]:
    """Logits that differ by row; the first `wrong` violating real rows stand below all others."""
    logits = {}
    for number, row in enumerate(rows):
        logit = (2 * row.label - 1) + number / 1000
        if row.id.startswith("real/") and row.label and number < 2 * wrong:
            logit = -5.0 - number
        logits[row.id] = logit
    return logits


def study_world(tmp_path: Path, kind: StudyKind) -> StudyWorld:
    world = World(tmp_path)
    (world.rules / f"{NAME}.yaml").write_text(RULE.format(name=NAME))
    sizes = (0, 20) if kind == "transfer" else (20, 40)
    points = tuple(StudyPoint(rows=rows, seed=seed) for rows in sizes for seed in (0, 1))
    study = Study(
        kind=kind, rule=NAME, data="rows.csv", path=None, labelled_for="no_doses", points=points
    )
    made = StudyWorld(world, tmp_path / "runs" / kind / NAME, study)
    made.write({"lora": 2, "alora": 6})
    return made


@pytest.fixture
def curve(tmp_path: Path) -> StudyWorld:
    return study_world(tmp_path, "curve")
