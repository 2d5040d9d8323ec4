"""The evaluated weights on an independent second test draw: `python -m eval.retest.run`, entry of
`make retest`.

The second set is a draw of the offline generator with another seed: other conversations of the same
phrasings, half of which stand in the training rows too. So it shows how far the first draw's
figures hold on another draw. How much carries over to phrasings that training has not shown is the
difference between its strata. Rows that come close to any row of the first set are dropped and
counted. With --data FOLDER the second set is FOLDER/<rule>/test.jsonl, which must come from the
same source as the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from eval import metrics
from eval.quality import mean_over
from eval.retest.answers import ServedDraws
from eval.retest.draws import all_draws
from eval.retest.report import Retest
from eval.served import OpenPredictor, Served, open_engine, score_missing
from eval.trial import answering_recipe
from guard.errors import exits_cleanly
from guard.layout import Runs
from guard.machine.provenance import provenance
from guard.recipe import Recipe, load_recipe
from guard.rule import RULES


def retest(
    selection: str,
    recipe: Recipe,
    data: Path | None = None,
    *,
    runs: Runs | None = None,
    rules: Path = RULES,
    open_predictor: OpenPredictor = open_engine,
) -> Retest:
    """Test the evaluated weights of the selected rules on the test sets in `data`. Without `data`,
    on a draw of the generator with another seed.

    Answers are kept: only what is missing is asked. Raises GuardError where a rule cannot be
    evaluated, or has no second test set of the same source, or none that differs from the first; if
    `all` rules are selected, such a rule is left out.
    """
    draws, left_out = all_draws(selection, recipe, data, runs or Runs(), rules)
    served = [ServedDraws(rule_draws) for rule_draws in draws]
    score_missing(_both(served), answering_recipe(recipe), open_predictor)
    retested = {
        served_draws.draws.first.rule.id: served_draws.retested() for served_draws in served
    }
    changes = {}
    for method in recipe.methods:
        outcomes = [served_draws.outcomes(method) for served_draws in served]
        changes[method] = metrics.bootstrap_mean_change(outcomes)
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
    for served_draws in served:
        yield served_draws.first
        yield served_draws.second


def _mean_by_method(by_rule: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    means = {}
    for method in by_rule[0]:
        means[method] = mean_over([values[method] for values in by_rule])
    return means


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.retest.run",
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
    path = Runs().root / "retest.json"
    retested.save(path)
    print(retested.as_markdown())
    print(f"written: {path}, {path.with_suffix('.md')}")


if __name__ == "__main__":
    main()
