"""What serving in bfloat16 does to verdicts: `python -m eval.experiments.serving_dtypes`.

Trained adapters answer their rules' test rows twice, the engine once in float32 and once in
bfloat16. Temperatures and thresholds are those of the cards, which were fitted in the dtype of
training. Knows
nothing of HTTP.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from scipy.stats import t as student_t
from tqdm import tqdm

from eval.markdown import markdown_table
from eval.metrics import auroc
from eval.served import OpenPredictor, Predictor, open_engine
from eval.trial import check_trained_on
from guard.conversation.example import Example, read_examples
from guard.errors import GuardError, exits_cleanly
from guard.files.figures import save_figures
from guard.files.yaml_file import Strict
from guard.layout import Runs
from guard.machine.provenance import provenance
from guard.recipe import Recipe, load_recipe
from guard.weights.card import Card, load_card
from serve.engine import Score, ScoreRequest
from serve.engine.adapter import trained

DTYPES = ("float32", "bfloat16")


class DtypeChange(Strict):
    """A rule's test rows in both dtypes.

    `flips`: verdicts that differ. Nats are the absolute differences of logits. A pair holds the
    figures in float32 and in bfloat16.
    """

    training_rows: int
    rows: int
    accuracy: tuple[float, float]
    auroc: tuple[float, float]
    flips: int
    median_nats: float
    p95_nats: float
    max_nats: float


class ServingDtypes(Strict):
    """The figures of all rules.

    Changes are bfloat16 minus float32: means over the rules, with a 95 % interval by Student's t.
    """

    model: str
    method: str
    rules: dict[str, DtypeChange]
    rows: int
    flips: int
    accuracy_change: float
    accuracy_change_ci95: tuple[float, float]
    auroc_change: float
    auroc_change_ci95: tuple[float, float]
    commit: str
    hardware: str
    versions: dict[str, str]

    def as_markdown(self) -> str:
        """The table and a sentence about it, as Markdown."""
        head = ["rule", "accuracy, %", "AUROC", "flips", "nats: median", "p95", "max"]
        rows = []
        for name, rule in self.rules.items():
            accuracy = ", ".join(f"{100 * value:.2f}" for value in rule.accuracy)
            area = ", ".join(f"{value:.4f}" for value in rule.auroc)
            nats = [f"{v:.3f}" for v in (rule.median_nats, rule.p95_nats, rule.max_nats)]
            rows.append([name, accuracy, area, str(rule.flips), *nats])
        low, high = self.accuracy_change_ci95
        note = (
            f"{self.method} on {self.model}, float32 and bfloat16: {self.flips} of {self.rows} "
            f"verdicts differ; accuracy changes by {100 * self.accuracy_change:+.2f} points, "
            f"95 % [{100 * low:+.2f}, {100 * high:+.2f}], AUROC by {self.auroc_change:+.5f}."
        )
        return "\n\n".join([markdown_table(head, rows), note])


def measure(
    rules: str | None,
    recipe: Recipe,
    runs: Runs,
    method: str,
    open_predictor: OpenPredictor = open_engine,
) -> ServingDtypes:
    """Ask the served weights of `rules`, separated by commas, or of all that are trained.

    Raises GuardError where weights or rows are missing, where the rows are not those of the
    training, where one is refused, or if there are fewer than two rules.
    """
    folders = trained(runs, recipe.name, method, rules)
    if len(folders) < 2:
        remedy = "Train a second one: the interval is over rules"
        raise GuardError(
            "at least two trained rules are needed for an interval",
            got=", ".join(folders),
            remedy=remedy,
        )
    cards = {rule: load_card(folder) for rule, folder in folders.items()}
    for rule, card in cards.items():
        check_trained_on(card, runs.data(rule))
    tests = {rule: read_examples(runs.data(rule) / "test.jsonl") for rule in folders}
    logits: dict[str, list[list[float]]] = {rule: [] for rule in folders}
    for dtype in DTYPES:
        served = recipe.model_copy(update={"engine": recipe.engine | {"dtype": dtype}})
        with open_predictor(served, folders) as engine:
            for rule in tqdm(folders, desc=dtype, unit="rule"):
                logits[rule].append(_logits(engine, cards[rule], tests[rule]))
    by_rule = {}
    for rule, card in cards.items():
        training_rows = len(read_examples(runs.data(rule) / "train.jsonl"))
        by_rule[rule] = _change(card, training_rows, tests[rule], logits[rule])
    return _report(recipe, method, by_rule)


def _report(recipe: Recipe, method: str, by_rule: dict[str, DtypeChange]) -> ServingDtypes:
    """The figures of all rules together."""
    measured = list(by_rule.values())
    accuracy, accuracy_ci95 = mean_change([rule.accuracy for rule in measured])
    area, area_ci95 = mean_change([rule.auroc for rule in measured])
    return ServingDtypes(
        model=recipe.name,
        method=method,
        rules=by_rule,
        rows=sum(rule.rows for rule in measured),
        flips=sum(rule.flips for rule in measured),
        accuracy_change=accuracy,
        accuracy_change_ci95=accuracy_ci95,
        auroc_change=area,
        auroc_change_ci95=area_ci95,
        **provenance(),
    )


def mean_change(pairs: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, float]]:
    """The mean of second minus first over pairs, with its 95 % interval by Student's t."""
    changes = np.diff(np.array(pairs), axis=1)
    mean = float(changes.mean())
    standard_error = float(changes.std(ddof=1)) / len(pairs) ** 0.5
    half = float(student_t.ppf(0.975, len(pairs) - 1)) * standard_error
    return mean, (mean - half, mean + half)


def _logits(engine: Predictor, card: Card, rows: Sequence[Example]) -> list[float]:
    requests = [ScoreRequest(row.messages, card.rule_text, card.rule) for row in rows]
    logits = []
    for outcome in engine.score(requests):
        if not isinstance(outcome, Score):
            raise GuardError("a row was refused", got=outcome, remedy="Run `make doctor`")
        logits.append(outcome.logit)
    return logits


def _change(
    card: Card, training_rows: int, rows: Sequence[Example], logits: Sequence[list[float]]
) -> DtypeChange:
    """The rule's figures from its logits in both dtypes.

    Raises GuardError if the rows' labels are all the same.
    """
    labels = np.array([row.label for row in rows])
    violates = []
    areas = []
    for dtype_logits in logits:
        verdicts = [card.calibration.verdict(card.rule, logit) for logit in dtype_logits]
        violates.append([verdict.violates for verdict in verdicts])
        area = auroc(labels, dtype_logits)
        if area is None:
            remedy = "Have test rows of both labels"
            raise GuardError("an AUROC needs rows of both labels", where=card.rule, remedy=remedy)
        areas.append(area)
    first, second = np.array(violates)
    nats = np.abs(np.diff(logits, axis=0))
    median, p95, largest = np.quantile(nats, [0.5, 0.95, 1.0]).tolist()
    return DtypeChange(
        training_rows=training_rows,
        rows=len(rows),
        accuracy=(float((first == labels).mean()), float((second == labels).mean())),
        auroc=(areas[0], areas[1]),
        flips=int((first != second).sum()),
        median_nats=median,
        p95_nats=p95,
        max_nats=largest,
    )


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.experiments.serving_dtypes",
        description="What serving in bfloat16 does to verdicts. Writes "
        "runs/serving_dtypes_METHOD.{json,md}.",
    )
    parser.add_argument("--rule", help="trained rules, separated by commas (default: all)")
    parser.add_argument("--model", default="tiny", help="a recipe in recipes/models")
    parser.add_argument("--method", default="alora", help="whose weights answer (default: alora)")
    arguments = parser.parse_args()
    measured = measure(arguments.rule, load_recipe(arguments.model), Runs(), arguments.method)
    path = Runs().root / f"serving_dtypes_{arguments.method}.json"
    table = measured.as_markdown()
    save_figures(path, measured.model_dump_json(indent=1), table)
    print(table)
    print(f"written: {path}, {path.with_suffix('.md')}")


if __name__ == "__main__":
    main()
