"""The adapters on a second test set: `python -m eval.retest`, entry of `make retest`. Was the first a lucky one?

The second set is a draw of the offline generator with another seed: other conversations of the same phrasings, half of which stand in the
training rows too. So it shows whether the first set was a lucky one; what carries over to phrasings that training has not shown is the
difference between its strata. Rows that come close to any row of the first set are dropped and counted. With --data FOLDER the second
set is FOLDER/<rule>/test.jsonl, which must come from the same source as the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from data import manifest
from data.build import GENERATOR, build
from data.generator.generate import Counts
from data.splits import near_duplicates
from eval import metrics
from eval.evaluation import mean_over, outcomes
from eval.served import OpenPredictor, Served, open_engine, score_missing
from eval.trial import Trial, load_trial
from guard.errors import GuardError, exits_cleanly
from guard.example import SPLITS, read_examples
from guard.files.atomic import atomic_write
from guard.files.yaml_file import Strict
from guard.layout import Runs
from guard.method import METHODS
from guard.provenance import provenance
from guard.recipe import Recipe, load_recipe
from guard.rule import RULES, load_rule, rule_names
from guard.verdict import expected_calibration_error

SEED = 1  # of the second draw; the first has 0


class Accuracy(Strict):
    """Of one method on one rule, over all seeds; `change` is the second test set's accuracy minus the first's."""

    first: float
    first_ci95: tuple[float, float]
    second: float
    second_ci95: tuple[float, float]
    change: float
    change_ci95: tuple[float, float]


class Retested(Strict):
    """One rule: `dropped` rows of the second set came close to a row of the first."""

    n_first: int
    n_second: int
    dropped: int
    seeds: tuple[int, ...]
    methods: dict[str, Accuracy]
    strata: dict[str, dict[str, Accuracy]]  # by `meta.stratum`
    ece: dict[str, float | None]  # of both sets together, which is twice the rows. Mean over seeds
    ece_floor: dict[str, float | None]  # what perfect probabilities would have had on them


class Retest(Strict):
    """All rules, and the mean change over them by method, with its 95 % interval."""

    model: str
    data: str
    left_out: tuple[str, ...]  # rules without a second set, and why
    rules: dict[str, Retested]
    mean_change: dict[str, float]
    mean_change_ci95: dict[str, tuple[float, float]]
    mean_ece: dict[str, float | None]
    mean_ece_floor: dict[str, float | None]
    commit: str
    hardware: str
    versions: dict[str, str]

    def as_markdown(self) -> str:
        """The table, rules as rows."""
        lines = [
            f"Accuracy on {self.data}, another test set, beside the first (95 % intervals; change = second minus first)",
            "",
        ]
        lines += [
            "| rule | method | first | second | change | rows | dropped |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, rule in self.rules.items():
            for method, found in rule.methods.items():
                lines.append(
                    f"| {name} | {method} | {_row(found)} | {rule.n_second} | {rule.dropped} |"
                )
                lines += [
                    f"| | {method}, {stratum} | {_row(by_method[method])} | | |"
                    for stratum, by_method in rule.strata.items()
                ]
        for method in METHODS:
            alike = sum(
                each.methods[method].change_ci95[0] <= 0 <= each.methods[method].change_ci95[1]
                for each in self.rules.values()
            )
            mean = _points(self.mean_change[method], self.mean_change_ci95[method])
            lines.append(
                f"| **mean** | {method} | | no change within its interval: {alike} of {len(self.rules)} | **{mean}** | | |"
            )
        eces = ", ".join(
            f"{method} {ece:.3f} (if perfect {self.mean_ece_floor[method]:.3f})"
            for method, ece in self.mean_ece.items()
            if ece is not None
        )
        lines += [
            "",
            f"Expected calibration error on both sets together, mean over rules and seeds: {eces}",
        ]
        return "\n".join([*lines, *(f"\nLeft out: {why}" for why in self.left_out)])


@dataclass(frozen=True)
class Pair:
    """A rule's trial and the same adapters' on the second set, less the `dropped` rows."""

    first: Trial
    second: Trial
    dropped: int


def retest(
    selection: str,
    recipe: Recipe,
    data: Path | None = None,
    *,
    runs: Runs | None = None,
    rules: Path = RULES,
    open_predictor: OpenPredictor = open_engine,
) -> Retest:
    """Put the evaluated adapters of the selected rules to the test sets in `data`, without it to the generator's draw with SEED.

    Answers are kept: only what is missing is asked. Raises GuardError where a rule cannot be evaluated, or has no second test set of the
    same source, or none that differs from the first; of `all` rules such a one is left out.
    """
    runs = runs or Runs()
    pairs: list[Pair] = []
    left_out: list[str] = []
    for name in tqdm(
        rule_names(selection, rules), desc="drawing and comparing", unit="rule"
    ):  # with every row of the first set
        try:
            pairs.append(_pair(runs, recipe, name, data or _drawn(runs, name, rules), rules))
        except GuardError as error:
            if selection != "all":
                raise
            left_out.append(f"{name}: {error}")
    if not pairs:
        raise GuardError(
            "no rule has a second test set",
            got="; ".join(left_out),
            remedy="Run `make data train` for one",
        )
    served = [
        (Served(pair.first, with_base=False), Served(pair.second, with_base=False))
        for pair in pairs
    ]
    score_missing([each for both in served for each in both], recipe, open_predictor)
    found: dict[str, Retested] = {}
    both_sets: dict[str, list[tuple[metrics.Outcomes, metrics.Outcomes]]] = {
        method: [] for method in METHODS
    }
    for pair, both in zip(pairs, served, strict=True):
        calibration = {method: _calibration(both, method) for method in METHODS}
        answered = {
            method: (_answered(both[0], method), _answered(both[1], method)) for method in METHODS
        }
        for method in METHODS:
            both_sets[method].append(answered[method])
        strata = [
            [str(example.meta.get("stratum", "")) for example in trial.examples]
            for trial in (pair.first, pair.second)
        ]
        found[pair.first.rule.id] = Retested(
            n_first=len(pair.first.examples),
            n_second=len(pair.second.examples),
            dropped=pair.dropped,
            seeds=pair.first.seeds,
            methods={method: _accuracy(*answered[method]) for method in METHODS},
            ece={method: ece for method, (ece, _) in calibration.items()},
            ece_floor={method: floor for method, (_, floor) in calibration.items()},
            strata={
                name: {
                    method: _accuracy(
                        *(
                            _only(one, [s == name for s in its])
                            for one, its in zip(answered[method], strata, strict=True)
                        )
                    )
                    for method in METHODS
                }
                for name in sorted(set(strata[0]) & set(strata[1]))
                if len(set(strata[0])) > 1
            },
        )
    changes = {method: metrics.bootstrap_mean_change(each) for method, each in both_sets.items()}
    return Retest(
        model=recipe.name,
        data=str(data or "the generator's draw with another seed"),
        left_out=tuple(left_out),
        rules=found,
        mean_change={method: each.mean for method, each in changes.items()},
        mean_change_ci95={method: each.ci95 for method, each in changes.items()},
        mean_ece={
            method: mean_over([each.ece[method] for each in found.values()]) for method in METHODS
        },
        mean_ece_floor={
            method: mean_over([each.ece_floor[method] for each in found.values()])
            for method in METHODS
        },
        **provenance(),
    )


def _drawn(runs: Runs, name: str, rules: Path) -> Path:
    """The folder with the rule's second draw. Raises GuardError where the first is not the offline generator's."""
    if not (runs.data(name) / "test.jsonl").is_file():
        raise GuardError(
            "no test.jsonl", where=runs.data(name), remedy=f"Run `make all RULE={name}`"
        )
    source = manifest.load(runs.data(name)).get("source", "unknown")
    if source != GENERATOR:
        remedy = "Name the folder of another test set of that source: `python -m eval.retest --data FOLDER`"
        raise GuardError(
            "the rows are not the offline generator's",
            where=runs.data(name),
            got=source,
            remedy=remedy,
        )
    second = Runs(runs.root / "second")
    build(
        load_rule(name, rules),
        GENERATOR,
        Counts(train=4, validation=4),
        SEED,
        "keep",
        second.data(name),
    )
    return second.data(name).parent


def _pair(runs: Runs, recipe: Recipe, name: str, data: Path, rules: Path) -> Pair:
    first = load_trial(runs, recipe, recipe.base_revision, name, rules=rules)
    test = data / name / "test.jsonl"
    remedy = f"Write one, as `python -m data.build --rule {name} --seed 1 --runs FOLDER` does, and name FOLDER/data"
    if not test.is_file():
        raise GuardError("no second test set", where=test, remedy=remedy)
    sources = [
        str(manifest.load(folder).get("source", "unknown"))
        for folder in (runs.data(name), data / name)
    ]
    if sources[0] != sources[1]:
        raise GuardError(
            "the second test set has another source",
            where=test,
            got=f"{sources[1]}, the first {sources[0]}",
            remedy=remedy,
        )
    known = [
        replace(row, group=f"first/{row.group}")
        for split in SPLITS
        for row in read_examples(runs.data(name) / f"{split}.jsonl")
    ]
    rows = read_examples(test)
    near = {
        pair.second - len(known)
        for pair in near_duplicates([*known, *rows])
        if pair.first < len(known) <= pair.second
    }
    examples = tuple(row for index, row in enumerate(rows) if index not in near)
    if not examples:
        raise GuardError(
            "every row of the second test set comes close to a row of the first",
            where=test,
            remedy=remedy,
        )
    return Pair(first, replace(first, examples=examples, folder=first.folder / "retest"), len(near))


def _calibration(both: tuple[Served, Served], method: str) -> tuple[float | None, float | None]:
    """The error of the answers to both sets together, and that of perfect ones, means over seeds; None where one was refused."""
    labels = [example.label for served in both for example in served.trial.examples]
    eces: list[float | None] = []
    floors: list[float | None] = []
    for seed in both[0].trial.by_seed(method):
        p = [
            answer.p_violation
            for served in both
            for answer in served.answers(served.trial.by_seed(method)[seed])
        ]
        known = [one for one in p if one is not None]
        whole_answers = len(known) == len(p)
        eces.append(expected_calibration_error(labels, known) if whole_answers else None)
        floors.append(metrics.calibration_floor(known) if whole_answers else None)
    return mean_over(eces), mean_over(floors)


def _accuracy(first: metrics.Outcomes, second: metrics.Outcomes) -> Accuracy:
    change = metrics.bootstrap_mean_change([(first, second)])
    return Accuracy(
        first=float(first.values.mean()),
        first_ci95=metrics.accuracy_interval(first),
        second=float(second.values.mean()),
        second_ci95=metrics.accuracy_interval(second),
        change=change.mean,
        change_ci95=change.ci95,
    )


def _only(answered: metrics.Outcomes, chosen: Sequence[bool]) -> metrics.Outcomes:
    return metrics.Outcomes(answered.values[:, chosen], answered.groups[chosen])


def _row(found: Accuracy) -> str:
    first, second = (
        _percent(found.first, found.first_ci95),
        _percent(found.second, found.second_ci95),
    )
    return f"{first} | {second} | {_points(found.change, found.change_ci95)}"


def _answered(served: Served, method: str) -> metrics.Outcomes:
    answers = {
        seed: served.answers(adapter) for seed, adapter in served.trial.by_seed(method).items()
    }
    return outcomes(served.trial.examples, answers)


def _percent(share: float, ci95: tuple[float, float]) -> str:
    return f"{share:.1%} [{ci95[0]:.1%}, {ci95[1]:.1%}]"


def _points(change: float, ci95: tuple[float, float]) -> str:
    return f"{100 * change:+.1f} [{100 * ci95[0]:+.1f}, {100 * ci95[1]:+.1f}]"


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.retest",
        description="Accuracy on a second test set beside the first. Writes runs/retest.{json,md}.",
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
    found = retest(arguments.rule, load_recipe(arguments.model), arguments.data)
    table = found.as_markdown()
    for suffix, text in (
        (".json", json.dumps(found.model_dump(mode="json"), indent=1)),
        (".md", table),
    ):
        with atomic_write((Runs().root / "retest").with_suffix(suffix)) as part:
            part.write_text(text + "\n", encoding="utf-8")
    print(table)
    print(f"written: {Runs().root / 'retest.json'}, {Runs().root / 'retest.md'}")


if __name__ == "__main__":
    main()
