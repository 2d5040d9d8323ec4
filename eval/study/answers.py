"""What every method and the bag of words answer at a study's points, as logits of the test rows.

The methods' logits are those that training kept, from plain PEFT or transformers. Knows nothing of
figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from eval.bag_of_words.baseline import fit_bag_of_words
from eval.contender import BAG_OF_WORDS, on_base
from eval.trial import TrialRequirements
from guard.conversation.example import Example, read_examples
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import (
    Runs,
    fingerprint,
    is_current,
    mark_current,
    not_current,
    read_splits,
    split_files,
)
from guard.method import METHODS
from guard.recipe import Recipe
from guard.rule import Rule
from guard.study import Study, StudyPoint, point_runs
from guard.weights.predictions import read_predictions, write_predictions

# What the baseline's kept answers depend on besides the rows.
BASELINE_CODE = (
    *sorted((ROOT / "eval/bag_of_words").glob("*.py")),
    ROOT / "eval/metrics.py",
    ROOT / "guard/calibration_rows.py",
    ROOT / "guard/conversation/example.py",
    ROOT / "guard/prompt/text.py",
    ROOT / "guard/rule.py",
)

Logits = dict[tuple[int, str], NDArray[np.float64]]  # by rows and method: [seeds, test rows]


def study_logits(folder: Path, study: Study, recipes: Sequence[Recipe], rule: Rule) -> Logits:
    """The logits of every size and method of the study in `folder`, bag of words first. With
    several recipes, a method is named with its base.

    Raises GuardError where a point's weights are missing, or were trained on other rows or another
    base, for another wording, or by other settings.
    """
    tests = shared_test_rows(folder, study)
    balanced = rule.model_copy(update={"max_fpr": None})  # as the weights are trained
    contenders = [BAG_OF_WORDS]
    by_point: dict[tuple[StudyPoint, str], list[float]] = {}
    for recipe in recipes:
        names = {method: method for method in recipe.methods}
        if len(recipes) > 1:
            names = {method: on_base(recipe.name, method) for method in recipe.methods}
        contenders += names.values()
        for point in study.points:
            runs = point_runs(folder, point)
            data_hash = fingerprint(*split_files(runs.data(rule.id)))
            base_revision = recipe.base_revision
            required = TrialRequirements(runs, recipe, balanced, base_revision, data_hash, tests)
            for method, name in names.items():
                by_point[point, name] = _kept_logits(required, point, method)
    for point in tqdm(study.points, desc="bag of words", unit="point", leave=False):
        by_point[point, BAG_OF_WORDS] = _bag_logits(point_runs(folder, point), rule, tests)
    logits: Logits = {}
    for rows in study.sizes:
        for name in contenders:
            seed_logits = [by_point[point, name] for point in study.of_size(rows)]
            logits[rows, name] = np.array(seed_logits, dtype=np.float64)
    return logits


def shared_test_rows(folder: Path, study: Study) -> list[Example]:
    """The test rows, which are the same at every point. Raises GuardError where they are not."""
    files = [point_runs(folder, point).data(study.rule) / "test.jsonl" for point in study.points]
    if len({fingerprint(file) for file in files if file.is_file()}) > 1:
        remedy = f"Run `make {study.kind}` again"
        raise GuardError("the points have different test rows", where=folder, remedy=remedy)
    return read_examples(files[0])


def _kept_logits(required: TrialRequirements, point: StudyPoint, method: str) -> list[float]:
    seed = point.seed if METHODS[method].is_seeded else 0
    try:
        weights = required.contestant(method, seed)
    except GuardError as error:
        remedy = "Run the study's command again: it trains what is missing"
        problem, where, got = error.problem, error.where, error.got
        raise GuardError(problem, where=where, got=got, remedy=remedy) from error
    return [weights.reference_logits[row.id] for row in required.examples]


def _bag_logits(runs: Runs, rule: Rule, tests: Sequence[Example]) -> list[float]:
    """The baseline's logits, fitted on the point's own rows and kept beside its data."""
    data = runs.data(rule.id)
    folder = runs.root / BAG_OF_WORDS / rule.id
    inputs = fingerprint(*split_files(data), rule.reads, *BASELINE_CODE)
    if not is_current(folder, inputs):
        splits = read_splits(data)
        fitted = fit_bag_of_words(splits["train"], splits["validation"], rule.reads)
        logits = zip(tests, fitted.logits(tests), strict=True)
        folder.mkdir(parents=True, exist_ok=True)
        not_current(folder)
        write_predictions(folder, [(row.id, "test", logit) for row, logit in logits])
        mark_current(folder, inputs)
    predictions = read_predictions(folder, "test", f"Delete {folder}")
    return [predictions[row.id] for row in tests]
