"""The evaluated weights on an independent second test draw: `python -m eval.retest`, entry of `make
retest`.

The second set is a draw of the offline generator with another seed: other conversations of the same
phrasings, half of which stand in the training rows too. So it shows how far the first draw's
figures hold on another; what carries over to phrasings that training has not shown is the
difference between its strata. Rows that come close to any row of the first set are dropped and
counted. With --data FOLDER the second set is FOLDER/<rule>/test.jsonl, which must come from the
same source as the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import manifest
from data.build import build
from data.generator.generate import Counts
from data.splits import near_duplicates
from eval import metrics
from eval.markdown import interval_cell, markdown_table
from eval.quality import mean_over, outcomes
from eval.served import OpenPredictor, Served, open_engine, score_missing
from eval.trial import Trial, answering_recipe, load_trial
from guard.errors import GuardError, exits_cleanly
from guard.example import GENERATOR, SPLITS, Example, read_examples
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict
from guard.layout import Runs
from guard.machine.provenance import provenance
from guard.recipe import Recipe, load_recipe
from guard.rule import RULES, load_rule, rule_names
from guard.verdict import expected_calibration_error

SEED = 1  # of the second draw; the first has 0


class DrawAccuracy(Strict):
    """Of one method on one rule, over all seeds; `change` is the second draw's accuracy minus the
    first's.
    """

    first: float
    first_ci95: tuple[float, float]
    second: float
    second_ci95: tuple[float, float]
    change: float
    change_ci95: tuple[float, float]

    @property
    def has_no_change(self) -> bool:
        """Whether chance explains the change."""
        return self.change_ci95[0] <= 0 <= self.change_ci95[1]


class RetestedRule(Strict):
    """One rule: `dropped` rows of the second draw came close to a row of the first."""

    n_first: int
    n_second: int
    dropped: int
    seeds: tuple[int, ...]
    methods: dict[str, DrawAccuracy]
    strata: dict[str, dict[str, DrawAccuracy]]  # by `meta.stratum`, then by method
    ece: dict[str, float | None]  # of both draws together, which is twice the rows; mean over seeds
    ece_expected: dict[str, float | None]  # under perfect calibration on them


class Retest(Strict):
    """All rules, and the mean change over them by method, with its 95 % interval."""

    model: str
    data: str
    left_out: tuple[str, ...]  # rules without a second draw, and why
    rules: dict[str, RetestedRule]
    mean_change: dict[str, float]
    mean_change_ci95: dict[str, tuple[float, float]]
    mean_ece: dict[str, float | None]
    mean_ece_expected: dict[str, float | None]
    commit: str
    hardware: str
    versions: dict[str, str]

    def as_markdown(self) -> str:
        """The table, rules as rows."""
        head = ["rule", "method", "first", "second", "change", "rows", "dropped"]
        rows = [*self._rule_rows(), *self._mean_rows()]
        lines = [
            f"Accuracy in percent on {self.data}, an independent second test draw, beside the "
            "first (95 % intervals; change = second minus first)",
            "",
            markdown_table(head, rows),
            "",
            "Expected calibration error on both draws together, mean over rules and seeds: "
            + ", ".join(self._calibration()),
        ]
        return "\n".join([*lines, *(f"\nLeft out: {reason}" for reason in self.left_out)])

    def _rule_rows(self) -> Iterator[list[str]]:
        for name, rule in self.rules.items():
            for method, accuracy in rule.methods.items():
                yield [name, method, *_cells(accuracy), str(rule.n_second), str(rule.dropped)]
                for stratum, by_method in rule.strata.items():
                    yield ["", f"{method}, {stratum}", *_cells(by_method[method]), "", ""]

    def _mean_rows(self) -> Iterator[list[str]]:
        for method, change in self.mean_change.items():
            unchanged = [rule.methods[method].has_no_change for rule in self.rules.values()]
            share = f"{sum(unchanged)} of {len(unchanged)}"
            mean = _points(change, self.mean_change_ci95[method])
            alike = f"no change within its interval: {share}"
            yield ["**mean**", method, "", alike, f"**{mean}**", "", ""]

    def _calibration(self) -> Iterator[str]:
        for method, ece in self.mean_ece.items():
            if ece is not None:
                yield f"{method} {ece:.3f} (expected {self.mean_ece_expected[method]:.3f})"


@dataclass(frozen=True)
class TwoDraws:
    """A rule's trial and the same weights' on the second draw, less the `dropped` rows."""

    first: Trial
    second: Trial
    dropped: int


class ServedDraws:
    """The engine's answers on both draws of one rule."""

    def __init__(self, draws: TwoDraws) -> None:
        self.draws = draws
        self.first = Served(draws.first, with_base=False)
        self.second = Served(draws.second, with_base=False)

    def outcomes(self, method: str) -> tuple[metrics.Outcomes, metrics.Outcomes]:
        """Right or wrong on the first and on the second draw."""
        first = outcomes(self.draws.first.examples, self.first.answers_by_seed(method))
        second = outcomes(self.draws.second.examples, self.second.answers_by_seed(method))
        return first, second

    def retested(self) -> RetestedRule:
        """The rule's figures."""
        calibration = {method: self._calibration(method) for method in self.draws.first.methods}
        return RetestedRule(
            n_first=len(self.draws.first.examples),
            n_second=len(self.draws.second.examples),
            dropped=self.draws.dropped,
            seeds=self.draws.first.seeds,
            methods={name: _accuracy(*self.outcomes(name)) for name in calibration},
            strata={name: self._stratum(name) for name in self._strata()},
            ece={method: ece for method, (ece, _) in calibration.items()},
            ece_expected={method: expected for method, (_, expected) in calibration.items()},
        )

    def _strata(self) -> list[str]:
        """The strata of both draws, where the first has several."""
        first = {_stratum_of(example) for example in self.draws.first.examples}
        second = {_stratum_of(example) for example in self.draws.second.examples}
        if len(first) < 2:
            return []
        return sorted(first & second)

    def _stratum(self, name: str) -> dict[str, DrawAccuracy]:
        """One stratum's accuracy by method."""
        by_method = {}
        for method in self.draws.first.methods:
            first, second = self.outcomes(method)
            by_method[method] = _accuracy(
                _of_stratum(first, self.draws.first.examples, name),
                _of_stratum(second, self.draws.second.examples, name),
            )
        return by_method

    def _calibration(self, method: str) -> tuple[float | None, float | None]:
        """ECE of the answers to both draws together, and the expected one, means over seeds; None
        where one was refused.
        """
        labels = [
            example.label for example in (*self.draws.first.examples, *self.draws.second.examples)
        ]
        eces: list[float | None] = []
        expected: list[float | None] = []
        second = self.second.answers_by_seed(method)
        for seed, answers in self.first.answers_by_seed(method).items():
            probabilities = [answer.p_violation for answer in (*answers, *second[seed])]
            p = [probability for probability in probabilities if probability is not None]
            if len(p) < len(labels):
                return None, None
            eces.append(expected_calibration_error(labels, p))
            expected.append(metrics.ece_expected(p))
        return mean_over(eces), mean_over(expected)


def retest(
    selection: str,
    recipe: Recipe,
    data: Path | None = None,
    *,
    runs: Runs | None = None,
    rules: Path = RULES,
    open_predictor: OpenPredictor = open_engine,
) -> Retest:
    """Put the evaluated weights of the selected rules to the test sets in `data`, without it to the
    generator's draw with SEED.

    Answers are kept: only what is missing is asked. Raises GuardError where a rule cannot be
    evaluated, or has no second test set of the same source, or none that differs from the first; of
    `all` rules such a one is left out.
    """
    draws, left_out = _all_draws(selection, recipe, data, runs or Runs(), rules)
    served = [ServedDraws(of_rule) for of_rule in draws]
    score_missing(_both(served), answering_recipe(recipe), open_predictor)
    retested = {of_rule.draws.first.rule.id: of_rule.retested() for of_rule in served}
    changes = {}
    for method in recipe.methods:
        of_rules = [of_rule.outcomes(method) for of_rule in served]
        changes[method] = metrics.bootstrap_mean_change(of_rules)
    return Retest(
        model=recipe.name,
        data=str(data or "the generator's draw with another seed"),
        left_out=left_out,
        rules=retested,
        mean_change={method: change.mean for method, change in changes.items()},
        mean_change_ci95={method: change.ci95 for method, change in changes.items()},
        mean_ece=_mean_by_method([rule.ece for rule in retested.values()]),
        mean_ece_expected=_mean_by_method([rule.ece_expected for rule in retested.values()]),
        **provenance(),
    )


def _both(served: Sequence[ServedDraws]) -> Iterator[Served]:
    for of_rule in served:
        yield of_rule.first
        yield of_rule.second


def _mean_by_method(by_rule: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    means = {}
    for method in by_rule[0]:
        means[method] = mean_over([values[method] for values in by_rule])
    return means


def _all_draws(
    selection: str, recipe: Recipe, data: Path | None, runs: Runs, rules: Path
) -> tuple[list[TwoDraws], tuple[str, ...]]:
    """The draws of the selected rules, and of `all` those that are left out, with the reason.

    Raises GuardError if none remains.
    """
    draws: list[TwoDraws] = []
    left_out: list[str] = []
    for name in tqdm(rule_names(selection, rules), desc="drawing and comparing", unit="rule"):
        try:
            second = data or _drawn(runs, name, rules)
            first = load_trial(runs, recipe, recipe.base_revision, name, rules=rules)
            draws.append(_two_draws(first, second / name))
        except GuardError as error:
            if selection != "all":
                raise
            left_out.append(f"{name}: {error}")
    if not draws:
        raise GuardError(
            "no rule has a second test set",
            got="; ".join(left_out),
            remedy="Run `make data train` for one",
        )
    return draws, tuple(left_out)


def _drawn(runs: Runs, name: str, rules: Path) -> Path:
    """The folder with the rule's second draw.

    Raises GuardError where the first is not the offline generator's.
    """
    first = runs.data(name)
    if not (first / "test.jsonl").is_file():
        raise GuardError("no test.jsonl", where=first, remedy=f"Run `make all RULE={name}`")
    if _source(first) != GENERATOR:
        raise GuardError(
            "the rows are not the offline generator's",
            where=first,
            got=_source(first),
            remedy="Name the folder of another test set of that source: "
            "`python -m eval.retest --data FOLDER`",
        )
    folder = Runs(runs.root / "second").data(name)
    counts = Counts(train=4, validation=4)
    build(load_rule(name, rules), GENERATOR, counts, SEED, "keep", folder)
    return folder.parent


def _source(data: Path) -> str:
    """Where a rule's rows come from."""
    return str(manifest.load(data).get("source", "unknown"))


def _two_draws(first: Trial, second: Path) -> TwoDraws:
    """Both draws, the second without what comes close to the first.

    Raises GuardError where it is none, or nothing is left.
    """
    test = second / "test.jsonl"
    remedy = (
        f"Write one, as `python -m data.build --rule {first.rule.id} --seed {SEED} --runs FOLDER` "
        "does, and name FOLDER/data"
    )
    if not test.is_file():
        raise GuardError("no second test set", where=test, remedy=remedy)
    if _source(first.data) != _source(second):
        got = f"{_source(second)}, the first {_source(first.data)}"
        problem = "the second test set has another source"
        raise GuardError(problem, where=test, got=got, remedy=remedy)
    rows = read_examples(test)
    near = _near_rows(_rows_of(first.data), rows)
    examples = tuple(row for index, row in enumerate(rows) if index not in near)
    if not examples:
        problem = "every row of the second test set comes close to a row of the first"
        raise GuardError(problem, where=test, remedy=remedy)
    second_trial = replace(first, examples=examples, folder=first.folder / "retest")
    return TwoDraws(first, second_trial, len(near))


def _rows_of(data: Path) -> list[Example]:
    """Every row of the first draw, in groups that no second draw has."""
    rows: list[Example] = []
    for split in SPLITS:
        rows += read_examples(data / f"{split}.jsonl")
    return [replace(row, group=f"first/{row.group}") for row in rows]


def _near_rows(first: Sequence[Example], second: Sequence[Example]) -> set[int]:
    """The rows of the second draw that come close to one of the first, by their index."""
    near = set()
    for pair in near_duplicates([*first, *second]):
        if pair.first < len(first) <= pair.second:
            near.add(pair.second - len(first))
    return near


def _accuracy(first: metrics.Outcomes, second: metrics.Outcomes) -> DrawAccuracy:
    change = metrics.bootstrap_mean_change([(first, second)])
    return DrawAccuracy(
        first=float(first.values.mean()),
        first_ci95=metrics.accuracy_interval(first),
        second=float(second.values.mean()),
        second_ci95=metrics.accuracy_interval(second),
        change=change.mean,
        change_ci95=change.ci95,
    )


def _stratum_of(example: Example) -> str:
    return str(example.meta.get("stratum", ""))


def _of_stratum(
    right: metrics.Outcomes, examples: Sequence[Example], stratum: str
) -> metrics.Outcomes:
    chosen = np.array([_stratum_of(example) == stratum for example in examples])
    return metrics.Outcomes(right.values[:, chosen], right.groups[chosen])


def _cells(accuracy: DrawAccuracy) -> list[str]:
    """First, second, change."""
    return [
        f"{100 * accuracy.first:.1f} {interval_cell(accuracy.first_ci95)}",
        f"{100 * accuracy.second:.1f} {interval_cell(accuracy.second_ci95)}",
        _points(accuracy.change, accuracy.change_ci95),
    ]


def _points(change: float, ci95: tuple[float, float]) -> str:
    return f"{100 * change:+.1f} [{100 * ci95[0]:+.1f}, {100 * ci95[1]:+.1f}]"


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.retest",
        description="Accuracy on an independent second test draw beside the first. Writes "
        "runs/retest.{json,md}.",
    )
    parser.add_argument(
        "--rule", default="all", help="a rule's name, several separated by commas, or all (default)"
    )
    parser.add_argument(
        "--model", default="tiny", help="a recipe in recipes/models (default: tiny)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="a folder with RULE/test.jsonl (default: the offline generator draws again)",
    )
    arguments = parser.parse_args()
    retested = retest(arguments.rule, load_recipe(arguments.model), arguments.data)
    table = retested.as_markdown()
    path = Runs().root / "retest.json"
    _write(path, json.dumps(retested.model_dump(mode="json"), indent=1))
    _write(path.with_suffix(".md"), table)
    print(table)
    print(f"written: {path}, {path.with_suffix('.md')}")


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as part:
        part.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
