"""Two versions of a rule's weights on the same test rows: `python -m eval.compare A B`, entry of
`make compare`.

A and B are folders of weights (`runs/MODEL/RULE/METHOD`), say two versions of a rule (`make rules`
names their folders), or two methods of one rule. What is compared
are verdicts: the logits that the training stage computed at its end, under each card's own
calibration. Loads no model. Exit status: 1 if B is worse than chance explains, 2 for what cannot be
compared (by make: 2 for either).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval import metrics
from eval.answers import Answer, Scored, group_numbers, scored_answers
from eval.quality import quality
from eval.report.tables import percent_cell
from guard.conversation.example import Example, read_examples
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs
from guard.weights.card import Card, load_card
from guard.weights.predictions import read_predictions

SIGNIFICANT = 0.05
SHOWN = 160  # characters of a conversation's last turn


@dataclass(frozen=True)
class Comparison:
    """Versions A and B on `examples`: their folders, and their answers in the rows' order."""

    rule: str
    folders: tuple[Path, Path]
    examples: tuple[Example, ...]
    a: Scored
    b: Scored

    @property
    def flips(self) -> list[int]:
        """The rows whose verdict differs, those that B gets wrong first."""
        changed = np.flatnonzero(self.a.decisions != self.b.decisions).tolist()
        return sorted(changed, key=lambda index: (bool(self.b.is_right[index]), index))

    @property
    def p(self) -> float:
        """McNemar's exact p of equal errors; it takes rows of a group as independent."""
        return metrics.mcnemar_exact_p(self.a.is_right, self.b.is_right)

    @property
    def is_regression(self) -> bool:
        """Whether B is worse than chance explains: in all verdicts, or in those of one label."""
        labels = self.a.labels
        # Three looks at the same rows: each has a third of the chance of a false alarm
        # (Bonferroni).
        parts = [labels >= 0, labels == 0, labels == 1]
        for part in parts:
            right_a, right_b = self.a.is_right[part], self.b.is_right[part]
            p = metrics.mcnemar_exact_p(right_a, right_b)
            if right_b.sum() < right_a.sum() and p < SIGNIFICANT / len(parts):
                return True
        return False

    def as_text(self) -> str:
        """For the terminal: both versions' rates, every flip, the verdict."""
        flips = [self._flip(index) for index in self.flips]
        worse = sum(not self.b.is_right[index] for index in self.flips)
        verdict = "no regression beyond chance"
        if self.is_regression:
            verdict = "REGRESSION: B is worse than chance explains"
        lines = [
            f"{self.rule}, {len(self.examples)} test rows",
            f"  {'':<3}{'accuracy':>9}{'recall':>8}{'FPR':>7}",
        ]
        for name, scored, folder in zip("AB", (self.a, self.b), self.folders, strict=True):
            rates = quality(scored).metrics
            cells = [percent_cell(rates[rate]) for rate in ("recall", "false_positive_rate")]
            accuracy = percent_cell(float(scored.is_right.mean()))
            lines.append(f"  {name:<3}{accuracy:>9}{cells[0]:>8}{cells[1]:>7}  {folder}")
        lines.append(
            f"{len(flips)} verdicts differ: {worse} now wrong, {len(flips) - worse} now right "
            f"(McNemar's p {self.p:.2g})"
        )
        return "\n".join([*lines, *flips, verdict])

    def _flip(self, index: int) -> str:
        """A row whose verdict differs: what it is now, both probabilities, its last turn."""
        example = self.examples[index]
        now = ("WRONG", "right")[int(self.b.is_right[index])]
        turn = example.messages[-1]
        text = textwrap.shorten(turn.content, SHOWN, placeholder="…")
        change = f"p {self.a.p_violation[index]:.2f} -> {self.b.p_violation[index]:.2f}"
        return f"  {now} {example.id}: label {example.label}, {change}, {turn.role}: {text}"


def compare(a: Path, b: Path, data: Path | None = None) -> Comparison:
    """The versions in two folders on the test rows in `data`, by default those of their rule in the
    runs folder they lie in. They may have been trained on different rows. Raises GuardError where
    they answer different rules, were tested on other rows, or have no prediction for one.
    """
    if data and not (data / "test.jsonl").is_file():
        remedy = "Name a data set's folder, such as runs/data/RULE, or leave DATA= out"
        raise GuardError("no folder with test.jsonl", where=data, remedy=remedy)
    card_a, card_b = load_card(a), load_card(b)
    if card_a.rule != card_b.rule:
        raise GuardError(
            "the two adapters answer different rules",
            where=b,
            got=f"{card_a.rule} and {card_b.rule}",
            remedy="Name two versions of one rule",
        )
    test = (data or _data_beside(a, card_a.rule)) / "test.jsonl"
    examples = tuple(read_examples(test))
    if not examples or len({example.id for example in examples}) < len(examples):
        problem = "no test rows, or two with one id"
        raise GuardError(problem, where=test, remedy="Run `make data` for this rule")
    scored = [_scored(a, card_a, test, examples), _scored(b, card_b, test, examples)]
    return Comparison(card_a.rule, (a, b), examples, *scored)


def _scored(folder: Path, card: Card, test: Path, examples: Sequence[Example]) -> Scored:
    """The verdicts of the weights in `folder`. Raises GuardError if tested on other rows."""
    if card.test_sha256 != hashlib.sha256(test.read_bytes()).hexdigest():
        # Rows with the same ids may say something else.
        remedy = f"Name its data's folder (DATA=), or train it again on these: `{card.retrain}`"
        raise GuardError(f"its test rows are not those in {test}", where=folder, remedy=remedy)
    logits = read_predictions(folder, "test", f"Run `{card.retrain}`")
    missing = [example.id for example in examples if example.id not in logits]
    if missing:
        count = f"{len(missing)} of {len(examples)} test rows"
        problem = f"no predictions for {count}: trained on other data"
        remedy = f"Train it again on these data: `{card.retrain}`"
        raise GuardError(problem, where=folder, got=missing[0], remedy=remedy)
    answers: list[Answer] = []
    for example in examples:
        verdict = card.calibration.verdict(card.rule, logits[example.id])
        answers.append(Answer(verdict.violates, logits[example.id], verdict.p_violation))
    labels = [example.label for example in examples]
    return scored_answers(labels, answers, group_numbers(examples))


def _data_beside(folder: Path, rule: str) -> Path:
    """The rule's data under the runs folder of the weights. Raises GuardError."""
    for parent in folder.resolve().parents:
        data = Runs(parent).data(rule)
        if (data / "test.jsonl").is_file():
            return data
    raise GuardError(
        f"no test rows of {rule} in any folder above the adapter",
        where=folder,
        remedy="Name the folder of its data (DATA=)",
    )


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.compare",
        description="Which verdicts differ between two versions of a rule's weights, and whether "
        "B is worse.",
    )
    parser.add_argument("a", type=Path, help="a folder of weights; `make rules` names those kept")
    parser.add_argument("b", type=Path, help="another one of the same rule")
    data = "folder with test.jsonl (default: the rule's, in the runs folder that A lies in)"
    parser.add_argument("--data", type=Path, help=data)
    arguments = parser.parse_args()
    if Path() in (arguments.a, arguments.b):
        parser.error(
            "name two folders of weights, as in "
            "make compare A=runs/registry/versions/3f2a... B=runs/tiny/RULE/alora"
        )
    comparison = compare(arguments.a, arguments.b, arguments.data)
    print(comparison.as_text())
    sys.exit(int(comparison.is_regression))


if __name__ == "__main__":
    main()
