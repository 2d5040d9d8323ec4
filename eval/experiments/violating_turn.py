"""Which turn carries a violation, by what the served adapter says.

`python -m eval.experiments.violating_turn --rule RULE`.

The offline generator notes which act each turn performs, so the violating turn of every violating
row is known. There are three ways to name it: the first turn at whose end the rule is violated, as
`POST /v1/check/turns` does; the turn at which the logit rises most; and the turn without which the
logit falls most (leave-one-out). The report also says how often the verdict at a turn's end is
right, and what the first way could reach if turns erred independently. Knows nothing of HTTP.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from eval.markdown import markdown_table
from eval.metrics import Outcomes, accuracy_interval
from eval.scored import group_numbers
from eval.served import OpenPredictor, open_engine
from eval.trial import check_trained_on
from guard.conversation.example import Example, Message, read_examples
from guard.errors import GuardError, exits_cleanly
from guard.files.figures import save_figures
from guard.files.yaml_file import Strict
from guard.layout import Runs
from guard.machine.provenance import provenance
from guard.recipe import Recipe, load_recipe
from guard.rule import load_rule
from guard.verdict import Calibration
from guard.weights.card import Card, load_card
from serve.engine import Score, ScoreRequest
from serve.engine.adapter import trained

TURNS = 3  # that a row must have at least: with two, there is little to choose from


class RightShare(Strict):
    """How often something was right, of how many, with its 95 % interval.

    The interval is that of `accuracy_interval`: the turns of a row are right or wrong together.
    """

    right: int
    total: int
    ci95: tuple[float, float]

    @classmethod
    def of(cls, by_row: Sequence[Sequence[bool]], groups: NDArray[np.int64]) -> RightShare:
        """The share of true outcomes over all rows; `groups` has a group for each row."""
        right = np.array([list(itertools.chain.from_iterable(by_row))], dtype=np.int8)
        ci95 = 0.0, 1.0
        if right.size:
            outcome_groups = np.repeat(groups, [len(row) for row in by_row])
            ci95 = accuracy_interval(Outcomes(right, outcome_groups))
        return cls(right=int(right.sum()), total=right.size, ci95=ci95)

    @property
    def text(self) -> str:
        """The share in percent, with the interval and the counts."""
        low, high = (f"{100 * bound:.1f}" for bound in self.ci95)
        share = 100 * self.right / self.total if self.total else 0.0
        return f"{share:.1f} [{low}, {high}], {self.right} of {self.total}"


class ViolatingTurns(Strict):
    """The figures of one rule's violating test rows.

    `allowed_by_accuracy`: the mean probability that every turn up to the violating one has the
    right verdict, at the accuracy of allowed and of violating turns, if turns erred independently.
    """

    model: str
    rule: str
    method: str
    mean_turns: float
    first_violation: RightShare
    largest_rise: RightShare
    leave_one_out: RightShare
    detected: RightShare  # the whole conversation is a violation
    turns_before: RightShare  # the verdict at the end of a turn before the violating one
    turn_itself: RightShare  # the verdict at the end of the violating turn
    turns_after: RightShare  # the verdict at the end of a turn after it
    allowed_by_accuracy: float
    commit: str
    hardware: str
    versions: dict[str, str]

    def as_markdown(self) -> str:
        """The table with a caption and a note, as Markdown."""
        rows = [
            ["first turn with a violation", self.first_violation.text],
            ["turn of the largest rise", self.largest_rise.text],
            ["leave-one-out", self.leave_one_out.text],
            ["whole conversation is a violation", self.detected.text],
            ["verdict at a turn before", self.turns_before.text],
            ["verdict at the violating turn", self.turn_itself.text],
            ["verdict at a turn after", self.turns_after.text],
        ]
        caption = (
            f"Which turn violates {self.rule}, {self.method} on {self.model}: percent right on "
            f"violating test rows of at least {TURNS} turns (on average {self.mean_turns:.1f}), "
            "with 95 % intervals"
        )
        allowed = f"{100 * self.allowed_by_accuracy:.1f} %"
        note = f"If turns erred independently, the first violation would be right in {allowed}."
        return "\n\n".join([caption, markdown_table(["", "right"], rows), note])


@dataclass(frozen=True)
class Curve:
    """A row's violating turn, and its logits at the end of each turn and without each turn."""

    violating: int
    at_end: list[float]
    without: list[float]

    @property
    def largest_rise(self) -> int:
        """The turn at which the logit rises most; the first, from a logit of 0."""
        return int(np.diff(self.at_end, prepend=0.0).argmax())

    @property
    def most_needed(self) -> int:
        """The turn without which the logit is lowest."""
        return int(np.argmin(self.without))

    def verdicts(self, calibration: Calibration) -> list[bool]:
        """Whether the rule is violated at the end of each turn."""
        return [calibration.verdict("", logit).violates for logit in self.at_end]

    def first_violation(self, calibration: Calibration) -> int | None:
        """The first turn at whose end the rule is violated."""
        verdicts = self.verdicts(calibration)
        return verdicts.index(True) if True in verdicts else None

    def right(self, calibration: Calibration) -> dict[str, list[bool]]:
        """Which outcomes of the row are right, by the fields of ViolatingTurns."""
        verdicts = self.verdicts(calibration)
        return {
            "first_violation": [self.first_violation(calibration) == self.violating],
            "largest_rise": [self.largest_rise == self.violating],
            "leave_one_out": [self.most_needed == self.violating],
            "detected": [verdicts[-1]],
            "turns_before": [not verdict for verdict in verdicts[: self.violating]],
            "turn_itself": [verdicts[self.violating]],
            "turns_after": verdicts[self.violating + 1 :],
        }


def violating_turn(row: Example) -> int | None:
    """The first turn that performs the row's violating act; None where the row does not say."""
    act = f"{row.rule}/{row.meta.get('violating_act')}"
    acts = row.meta.get("acts") or []
    return acts.index(act) if row.label == 1 and act in acts else None


def measure(
    rule: str, recipe: Recipe, runs: Runs, method: str, open_predictor: OpenPredictor = open_engine
) -> ViolatingTurns:
    """Ask the rule's served weights.

    Raises GuardError where there are no weights, no rows that say which turn violates, or other
    rows than those of the training.
    """
    folder = trained(runs, recipe.name, method, rule)[rule]
    rows = read_examples(runs.data(rule) / "test.jsonl")
    judged = [row for row in rows if len(row.messages) >= TURNS and violating_turn(row) is not None]
    if not judged:
        remedy = "Run `make data` without DATA=: the offline generator notes its turns"
        raise GuardError("no test row says which turn violates", where=rule, remedy=remedy)
    card = load_card(folder)
    check_trained_on(card, runs.data(rule))
    with open_predictor(recipe, {rule: folder}) as engine:

        def logits(conversations: Sequence[tuple[Message, ...]]) -> list[float]:
            requests = [ScoreRequest(messages, card.rule_text, rule) for messages in conversations]
            scores = []
            for outcome in engine.score(requests):
                if not isinstance(outcome, Score):
                    raise GuardError("a row was refused", got=outcome, remedy="Run `make doctor`")
                scores.append(outcome.logit)
            return scores

        curves = [_curve(row, logits) for row in tqdm(judged, unit="row")]
    return _report(curves, group_numbers(judged), card, recipe.name, method)


def _curve(row: Example, logits: Callable[[Sequence[tuple[Message, ...]]], list[float]]) -> Curve:
    turns = range(len(row.messages))
    violating = violating_turn(row)
    assert violating is not None  # `measure` has left out the rows that do not say
    return Curve(
        violating,
        at_end=logits([row.messages[: turn + 1] for turn in turns]),
        without=logits([row.messages[:turn] + row.messages[turn + 1 :] for turn in turns]),
    )


def _report(
    curves: Sequence[Curve], groups: NDArray[np.int64], card: Card, model: str, method: str
) -> ViolatingTurns:
    rights = [curve.right(card.calibration) for curve in curves]
    shares: dict[str, Any] = {}
    for name in rights[0]:
        shares[name] = RightShare.of([right[name] for right in rights], groups)
    before, itself = shares["turns_before"], shares["turn_itself"]
    accuracy_before = before.right / before.total if before.total else 1.0
    reachable = [accuracy_before**curve.violating * itself.right / itself.total for curve in curves]
    return ViolatingTurns(
        model=model,
        rule=card.rule,
        method=method,
        mean_turns=float(np.mean([len(curve.at_end) for curve in curves])),
        allowed_by_accuracy=float(np.mean(reachable)),
        **shares,
        **provenance(),
    )


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.experiments.violating_turn",
        description="How often the turn that violates is named. Writes "
        "runs/violating_turn.{json,md}.",
    )
    parser.add_argument("--rule", required=True, help="a rule that is trained")
    parser.add_argument("--model", default="tiny", help="a recipe in recipes/models")
    parser.add_argument("--method", default="alora", help="whose weights answer (default: alora)")
    arguments = parser.parse_args()
    if load_rule(arguments.rule).turns == "last":
        problem = "where a rule reads the last turn alone, that turn always violates"
        raise GuardError(problem, where=arguments.rule, remedy="Name a rule with `turns: any`")
    measured = measure(arguments.rule, load_recipe(arguments.model), Runs(), arguments.method)
    path = Runs().root / "violating_turn.json"
    table = measured.as_markdown()
    save_figures(path, measured.model_dump_json(indent=1), table)
    print(table)
    print(f"written: {path}, {path.with_suffix('.md')}")


if __name__ == "__main__":
    main()
