"""Two versions of a rule's weights on the same test rows: `python -m eval.compare A B`, entry of
`make compare`.

A and B are folders of weights (`runs/MODEL/RULE/METHOD`), say those that training replaced
(`runs/MODEL/RULE/before/METHOD`) and their successor, or two methods of one rule. What is compared
are verdicts: the logits that the training stage computed at its end, under each card's own
calibration. Loads no model. Exit status: 1 if B is worse than chance explains, 2 for what cannot be
compared (by make: 2 for either).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval import metrics
from guard.conversation.example import Example, read_examples
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs
from guard.weights.card import Card, load_card
from guard.weights.predictions import read_predictions

SIGNIFICANT = 0.05
SHOWN = 160  # characters of a conversation's last turn


@dataclass(frozen=True)
class Version:
    """One version's verdicts on the rows, in their order."""

    folder: Path
    card: Card
    violates: tuple[bool, ...]
    p_violation: tuple[float, ...]

    def share(self, examples: Sequence[Example], label: int) -> float:
        """Flagged rows among those with `label`: recall for 1, the false-positive rate for 0."""
        rows = zip(self.violates, examples, strict=True)
        flagged = [violates for violates, example in rows if example.label == label]
        return sum(flagged) / max(1, len(flagged))

    def right(self, examples: Sequence[Example]) -> np.ndarray:
        """Whether each verdict is the label, bool [rows]."""
        rows = zip(self.violates, examples, strict=True)
        return np.array([violates == bool(example.label) for violates, example in rows])


@dataclass(frozen=True)
class Comparison:
    """A and B on `examples`."""

    a: Version
    b: Version
    examples: tuple[Example, ...]

    @property
    def flips(self) -> list[int]:
        """The rows whose verdict differs, those that B gets wrong first."""
        differs = np.array(self.a.violates) != np.array(self.b.violates)
        right = self.b.right(self.examples)
        changed = np.flatnonzero(differs).tolist()
        return sorted(changed, key=lambda index: (bool(right[index]), index))

    @property
    def p(self) -> float:
        """McNemar's exact p that A and B err equally often.

        It takes rows as independent, although pairs of a group are not.
        """
        return metrics.mcnemar_exact_p(self.a.right(self.examples), self.b.right(self.examples))

    @property
    def is_regression(self) -> bool:
        """Whether B is worse than chance explains: in all verdicts, or in those of one label."""
        right_a, right_b = self.a.right(self.examples), self.b.right(self.examples)
        labels = np.array([example.label for example in self.examples])
        parts = [np.full(len(labels), True), labels == 0, labels == 1]
        # Three looks at the same rows: each has a third of the chance of a false alarm
        # (Bonferroni).
        return any(
            right_b[part].sum() < right_a[part].sum()
            and metrics.mcnemar_exact_p(right_a[part], right_b[part]) < SIGNIFICANT / len(parts)
            for part in parts
        )

    def as_text(self) -> str:
        """For the terminal: both versions' rates, every flip, the verdict."""
        right = self.b.right(self.examples)
        worse = sum(not right[index] for index in self.flips)
        lines = [
            f"{self.a.card.rule}, {len(self.examples)} test rows",
            f"  {'':<3}{'accuracy':>9}{'recall':>8}{'FPR':>7}",
            self._rates("A", self.a),
            self._rates("B", self.b),
            f"{len(self.flips)} verdicts differ: {worse} now wrong, "
            f"{len(self.flips) - worse} now right (McNemar's p {self.p:.2g})",
            *(self._flip(index) for index in self.flips),
        ]
        if self.is_regression:
            return "\n".join([*lines, "REGRESSION: B is worse than chance explains"])
        return "\n".join([*lines, "no regression beyond chance"])

    def _rates(self, name: str, version: Version) -> str:
        accuracy = version.right(self.examples).mean()
        recall, fpr = version.share(self.examples, 1), version.share(self.examples, 0)
        return f"  {name:<3}{accuracy:>9.1%}{recall:>8.1%}{fpr:>7.1%}  {version.folder}"

    def _flip(self, index: int) -> str:
        """A row whose verdict differs: what it is now, its label, both probabilities, its last
        turn.
        """
        example = self.examples[index]
        is_right = self.b.violates[index] == bool(example.label)
        change = f"p {self.a.p_violation[index]:.2f} -> {self.b.p_violation[index]:.2f}"
        text = " ".join(example.messages[-1].content.split())
        if len(text) > SHOWN:
            text = f"{text[:SHOWN]}…"
        last_turn = f"{example.messages[-1].role}: {text}"
        verdict = "right" if is_right else "WRONG"
        return f"  {verdict} {example.id}: label {example.label}, {change}, {last_turn}"

    def as_json(self) -> str:
        """For programs."""
        report = {
            "a": str(self.a.folder),
            "b": str(self.b.folder),
            "flips": [self.examples[index].id for index in self.flips],
            "p": self.p,
            "regression": self.is_regression,
        }
        return json.dumps(report, indent=1) + "\n"


def compare(a: Path, b: Path, data: Path | None = None) -> Comparison:
    """The versions in two folders on the test rows in `data`, by default those of their rule in the
    runs folder they lie in.

    They may have been trained on different rows. Raises GuardError where they answer different
    rules, were tested on other rows, or have no prediction for one.
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
    version_a, version_b = _version(a, card_a, test, examples), _version(b, card_b, test, examples)
    return Comparison(version_a, version_b, examples)


def _version(folder: Path, card: Card, test: Path, examples: Sequence[Example]) -> Version:
    """The verdicts of the weights in `folder`.

    Raises GuardError where they were tested on other rows than those in `test`.
    """
    test_sha256 = hashlib.sha256(test.read_bytes()).hexdigest()
    if card.test_sha256 != test_sha256:  # rows with the same ids may say something else
        remedy = (
            f"Name the folder of its data (DATA=), or train it again on these: `{card.retrain}`"
        )
        raise GuardError(f"its test rows are not those in {test}", where=folder, remedy=remedy)
    logits = read_predictions(folder, "test", f"Run `{card.retrain}`")
    missing = [example.id for example in examples if example.id not in logits]
    if missing:
        count = f"{len(missing)} of {len(examples)} test rows"
        raise GuardError(
            f"no predictions for {count}: trained on other data",
            where=folder,
            got=missing[0],
            remedy=f"Train it again on these data: `{card.retrain}`",
        )
    verdicts = [card.calibration.verdict(card.rule, logits[example.id]) for example in examples]
    return Version(
        folder,
        card,
        tuple(verdict.violates for verdict in verdicts),
        tuple(verdict.p_violation for verdict in verdicts),
    )


def _data_beside(folder: Path, rule: str) -> Path:
    """The rule's data under the runs folder that the weights' folder lies in.

    Raises GuardError where there are none.
    """
    for parent in folder.resolve().parents:
        data = Runs(parent).data(rule)
        if (data / "test.jsonl").is_file():
            return data
    raise GuardError(
        f"no test rows of {rule} in any folder above the adapter",
        where=folder,
        remedy="Name the folder of its data (DATA=)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.compare",
        description="Which verdicts differ between two versions of a rule's weights, and whether "
        "B is worse.",
    )
    parser.add_argument(
        "a",
        type=Path,
        help="a folder of weights; make train keeps the one it replaced, as "
        "runs/tiny/RULE/before/METHOD",
    )
    parser.add_argument("b", type=Path, help="another one of the same rule")
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with test.jsonl (default: the rule's, in the runs folder that A lies in)",
    )
    parser.add_argument("--json", type=Path, help="also write the comparison there")
    return parser


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = _parser()
    arguments = parser.parse_args()
    if Path() in (arguments.a, arguments.b):
        parser.error(
            "name two folders of weights, as in "
            "make compare A=runs/tiny/RULE/before/alora B=runs/tiny/RULE/alora"
        )
    comparison = compare(arguments.a, arguments.b, arguments.data)
    print(comparison.as_text())
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(comparison.as_json(), encoding="utf-8")
    sys.exit(int(comparison.is_regression))


if __name__ == "__main__":
    main()
