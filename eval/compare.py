"""Two versions of an adapter on the same test rows: `python -m eval.compare A B`, entry of `make compare`. Loads no model.

A and B are adapter folders (`runs/MODEL/RULE/METHOD`), say the one that training replaced (`runs/MODEL/RULE/before/METHOD`) and its
successor, or the LoRA and the aLoRA of one rule. What is compared are verdicts: the logits that plain PEFT gave at the end of training,
under each card's own calibration. Exit status: 1 if B is worse than chance explains, 2 for what cannot be compared (by make: 2 for either).
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
from guard.card import Card, load_card
from guard.errors import GuardError, exits_cleanly
from guard.example import Example, read_examples
from guard.layout import Runs
from guard.predictions import read_predictions

SIGNIFICANT = 0.05
SHOWN = 160  # characters of a conversation's last turn


@dataclass(frozen=True)
class Version:
    """One adapter's verdicts on the rows, in their order."""

    folder: Path
    card: Card
    violates: tuple[bool, ...]
    p_violation: tuple[float, ...]

    def share(self, examples: Sequence[Example], label: int) -> float:
        """Flagged rows among those with `label`: recall for 1, the false-positive rate for 0."""
        flagged = [
            found
            for found, example in zip(self.violates, examples, strict=True)
            if example.label == label
        ]
        return sum(flagged) / max(1, len(flagged))

    def right(self, examples: Sequence[Example]) -> np.ndarray:
        """Whether each verdict is the label."""
        return np.array(
            [
                found == bool(example.label)
                for found, example in zip(self.violates, examples, strict=True)
            ]
        )


@dataclass(frozen=True)
class Comparison:
    """A and B on `examples`."""

    a: Version
    b: Version
    examples: tuple[Example, ...]

    @property
    def flips(self) -> list[int]:
        """The rows whose verdict differs, those that B gets wrong first."""
        changed = [
            index
            for index, (one, other) in enumerate(zip(self.a.violates, self.b.violates, strict=True))
            if one != other
        ]
        return sorted(
            changed,
            key=lambda index: (self.b.violates[index] == bool(self.examples[index].label), index),
        )

    @property
    def p(self) -> float:
        """McNemar's exact p that A and B err equally often. It takes rows as independent, although pairs of a group are not."""
        return metrics.mcnemar_exact_p(self.a.right(self.examples), self.b.right(self.examples))

    @property
    def is_regression(self) -> bool:
        """Whether B is worse than chance explains: in all its verdicts, or in those of one label."""
        right_a, right_b = self.a.right(self.examples), self.b.right(self.examples)
        labels = np.array([example.label for example in self.examples])
        parts = [np.full(len(labels), True), labels == 0, labels == 1]
        # Three looks at the same rows: each has a third of the chance of a false alarm (Bonferroni).
        return any(
            right_b[part].sum() < right_a[part].sum()
            and metrics.mcnemar_exact_p(right_a[part], right_b[part]) < SIGNIFICANT / len(parts)
            for part in parts
        )

    def as_text(self) -> str:
        """For the terminal: both versions' rates, every flip, the verdict."""
        lines = [
            f"{self.a.card.rule}, {len(self.examples)} test rows",
            f"  {'':<3}{'accuracy':>9}{'recall':>8}{'FPR':>7}",
        ]
        for name, version in (("A", self.a), ("B", self.b)):
            rates = (
                version.right(self.examples).mean(),
                version.share(self.examples, 1),
                version.share(self.examples, 0),
            )
            lines.append(
                f"  {name:<3}{rates[0]:>9.1%}{rates[1]:>8.1%}{rates[2]:>7.1%}  {version.folder}"
            )
        worse = sum(
            self.b.violates[index] != bool(self.examples[index].label) for index in self.flips
        )
        lines.append(
            f"{len(self.flips)} verdicts differ: {worse} now wrong, {len(self.flips) - worse} now right (McNemar's p {self.p:.2g})"
        )
        for index in self.flips:
            example = self.examples[index]
            now = "right" if self.b.violates[index] == bool(example.label) else "WRONG"
            last = " ".join(example.messages[-1].content.split())
            change = f"p {self.a.p_violation[index]:.2f} -> {self.b.p_violation[index]:.2f}"
            said = f"{example.messages[-1].role}: {last[:SHOWN]}{'…' * (len(last) > SHOWN)}"
            lines.append(f"  {now} {example.id}: label {example.label}, {change}, {said}")
        lines.append(
            "REGRESSION: B is worse than chance explains"
            if self.is_regression
            else "no regression beyond chance"
        )
        return "\n".join(lines)


def compare(a: Path, b: Path, data: Path | None = None) -> Comparison:
    """The versions in two adapter folders on the test rows in `data`, by default those of their rule in the runs folder they lie in.

    They may have been trained on different rows. Raises GuardError where they answer different rules, were tested on other rows, or have
    no prediction for one.
    """
    cards = [load_card(folder) for folder in (a, b)]
    if cards[0].rule != cards[1].rule:
        what, got = (
            "the two adapters answer different rules",
            f"{cards[0].rule} and {cards[1].rule}",
        )
        raise GuardError(what, where=b, got=got, remedy="Name two versions of one rule")
    test = (data or _data_beside(a, cards[0].rule)) / "test.jsonl"
    examples = tuple(read_examples(test))
    if not examples or len({example.id for example in examples}) < len(examples):
        raise GuardError(
            "no test rows, or two with one id", where=test, remedy="Run `make data` for this rule"
        )
    test_sha256 = hashlib.sha256(test.read_bytes()).hexdigest()
    versions = []
    for folder, card in zip((a, b), cards, strict=True):
        if card.test_sha256 != test_sha256:  # rows with the same ids may say something else
            remedy = (
                f"Name the folder of its data (DATA=), or train it again on these: `{card.retrain}`"
            )
            raise GuardError(f"its test rows are not those in {test}", where=folder, remedy=remedy)
        logits = read_predictions(folder, "test", f"Run `{card.retrain}`")
        if missing := [example.id for example in examples if example.id not in logits]:
            raise GuardError(
                f"no predictions for {len(missing)} of {len(examples)} test rows: trained on other data",
                where=folder,
                got=missing[0],
                remedy=f"Train it again on these data: `{card.retrain}`",
            )
        verdicts = [card.calibration.verdict(card.rule, logits[example.id]) for example in examples]
        versions.append(
            Version(
                folder,
                card,
                tuple(v.violates for v in verdicts),
                tuple(v.p_violation for v in verdicts),
            )
        )
    return Comparison(versions[0], versions[1], examples)


def _data_beside(folder: Path, rule: str) -> Path:
    """The rule's data under the runs folder that an adapter folder lies in. Raises GuardError where there are none."""
    for parent in folder.resolve().parents:
        if (found := Runs(parent).data(rule) / "test.jsonl").is_file():
            return found.parent
    raise GuardError(
        f"no test rows of {rule} in any folder above the adapter",
        where=folder,
        remedy="Name the folder of its data (DATA=)",
    )


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.compare",
        description="Which verdicts differ between two versions of an adapter, and whether B is worse.",
    )
    parser.add_argument(
        "a",
        type=Path,
        help="an adapter folder; make train keeps the one it replaced, as runs/tiny/RULE/before/alora",
    )
    parser.add_argument("b", type=Path, help="another one of the same rule")
    parser.add_argument(
        "--data",
        type=Path,
        help="folder with test.jsonl (default: the rule's, in the runs folder that A lies in)",
    )
    parser.add_argument("--json", type=Path, help="also write the comparison there")
    arguments = parser.parse_args()
    if Path() in (arguments.a, arguments.b):
        parser.error(
            "name two adapter folders, as in make compare A=runs/tiny/RULE/before/alora B=runs/tiny/RULE/alora"
        )
    comparison = compare(arguments.a, arguments.b, arguments.data)
    print(comparison.as_text())
    if arguments.json:
        ids = [comparison.examples[index].id for index in comparison.flips]
        report = {
            "a": str(arguments.a),
            "b": str(arguments.b),
            "flips": ids,
            "p": comparison.p,
            "regression": comparison.is_regression,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.exit(int(comparison.is_regression))


if __name__ == "__main__":
    main()
