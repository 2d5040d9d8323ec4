"""The table of the baseline alone: `python -m eval.bag_of_words`.

It is fitted on what `make data` wrote, or on your own rows. Needs no model.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from data.ingest import Splitting, ingest
from data.rows import read_rows
from eval.bag_of_words.baseline import BagVariant, fit_bag_of_words
from eval.markdown import accuracy_cell, markdown_table, metric_cells, metric_labels
from eval.quality import MethodQuality, Stratum, method_quality
from guard.arguments import whole_number
from guard.conversation.example import SPLITS, Example, Split
from guard.errors import GuardError, exits_cleanly
from guard.files.atomic import atomic_write
from guard.layout import Runs, read_splits
from guard.machine.provenance import provenance
from guard.rule import Judged, Reads, Rule, load_rule, rule_names


@dataclass(frozen=True)
class RuleData:
    """One rule's examples by split, and whose turns count in them."""

    name: str
    reads: Reads
    max_fpr: float | None
    splits: Mapping[Split, Sequence[Example]]


@dataclass(frozen=True)
class MeasuredBag:
    """A rule's baseline on its test split, and the seconds it took."""

    variant: BagVariant
    quality: MethodQuality
    seconds: float


def measure(rule: RuleData) -> MeasuredBag:
    """Fit the baseline of one rule and measure it on the test split."""
    started = time.perf_counter()
    fitted = fit_bag_of_words(
        rule.splits["train"], rule.splits["validation"], rule.reads, rule.max_fpr
    )
    test = rule.splits["test"]
    quality = method_quality(test, {0: fitted.answers(test)}, name_seeds=False)
    return MeasuredBag(fitted.variant, quality, round(time.perf_counter() - started, 1))


def _own_data(path: Path, seed: int, splitting: Splitting, judged: Judged | None) -> RuleData:
    """A folder of splits, or a file of labelled rows that `make data` could read.

    Raises GuardError on bad rows.
    """
    if path.is_dir():
        splits = read_splits(path)
        rows = [*splits["train"], *splits["validation"], *splits["test"]]
    else:
        rows = ingest(read_rows(str(path)), str(path), _stand_in(path), seed, splitting).examples
        splits = {}
        for split in SPLITS:
            splits[split] = [row for row in rows if row.split == split]
    return RuleData(_name_of(path), judged or _last_speaker(rows), None, splits)


def _name_of(path: Path) -> str:
    """The name that the table has for the rows of a folder or file."""
    return path.name.partition(".")[0]


def _stand_in(path: Path) -> Rule:
    """A rule that is good enough to read rows: named after the file, up to two underscores."""
    name = _name_of(path).partition("__")[0].lower()
    name = re.sub("^[^a-z]+", "", re.sub("[^a-z0-9_]", "_", name)) or "rows"
    text = "The rule that the rows are labelled for."
    return Rule(
        id=name, title=text, policy=text, judged="conversation", violates=(text,), allows=(text,)
    )


def _last_speaker(rows: Sequence[Example]) -> Judged:
    """The role that says the last turn of most rows; the whole conversation where no rule can judge
    that role.
    """
    speakers = [row.messages[-1].role for row in rows]
    most = max(sorted(set(speakers)), key=speakers.count)
    return next((judged for judged in get_args(Judged) if judged == most), "conversation")


def _table(measured: Mapping[str, MeasuredBag]) -> str:
    """A row for each rule, and one for each of its strata where there are several."""
    rows = []
    for rule, result in measured.items():
        rows.append([rule, *_cells(result.quality), str(result.variant)])
        if len(result.quality.strata) > 1:
            for name, stratum in result.quality.strata.items():
                rows.append([f"- {name}", *_cells(stratum), ""])
    return markdown_table(
        ["rule", "rows", "accuracy", *metric_labels("quality"), "chosen on validation"], rows
    )


def _cells(quality: MethodQuality | Stratum) -> list[str]:
    accuracy = accuracy_cell(quality.accuracy, quality.accuracy_ci95)
    return [str(quality.n), accuracy, *metric_cells(quality.metrics)]


def _as_json(measured: Mapping[str, MeasuredBag], seed: int) -> str:
    rules: dict[str, Any] = {}
    for name, result in measured.items():
        rules[name] = {
            "variant": result.variant.model_dump(),
            "seconds": result.seconds,
            **result.quality.model_dump(mode="json", exclude={"seeds", "accuracy_sd"}),
        }
    content = {
        "what": "the bag-of-words baseline on the test split, chosen on validation",
        **provenance(),
        "seed": seed,
        "rules": rules,
    }
    return json.dumps(content, indent=1) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bag_of_words",
        description="The bag-of-words baseline alone, from what make data wrote. Needs no model.",
    )
    parser.add_argument(
        "--rule", default="all", help="a rule's name, several separated by commas, or all (default)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        help="instead of rules: folders with train, validation and test.jsonl, or files of "
        "labelled rows as for make data",
    )
    parser.add_argument(
        "--splits",
        choices=get_args(Splitting),
        default="keep",
        help="the splits of files, as for make data (default: keep)",
    )
    parser.add_argument(
        "--judged",
        choices=get_args(Judged),
        help="whose turns are judged in --data (default: whoever speaks last in most rows)",
    )
    parser.add_argument(
        "--seed", type=whole_number, default=0, help="seed for SPLITS=new (default 0)"
    )
    parser.add_argument(
        "--runs", type=Path, default=Runs().root, help="where make data wrote (default runs/)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def _selected(arguments: argparse.Namespace) -> Iterator[RuleData]:
    if arguments.data:
        names = [_name_of(path) for path in arguments.data]
        if len(set(names)) < len(names):
            raise GuardError(
                "two inputs have the same name, so the table could not tell them apart",
                got=", ".join(names),
                remedy="Measure them one after the other",
            )
        for path in arguments.data:
            yield _own_data(path, arguments.seed, arguments.splits, arguments.judged)
        return
    for name in rule_names(arguments.rule):
        rule = load_rule(name)
        splits = read_splits(Runs(arguments.runs).data(name))
        yield RuleData(name, rule.reads, rule.max_fpr, splits)


@exits_cleanly
def main() -> None:
    """The command line."""
    arguments = _parser().parse_args()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    measured: dict[str, MeasuredBag] = {}
    for rule in tqdm(_selected(arguments), desc="bag of words", unit="rule"):
        measured[rule.name] = measure(rule)
    print(_table(measured))
    if arguments.json:
        with atomic_write(arguments.json) as part:
            part.write_text(_as_json(measured, arguments.seed), encoding="utf-8")
        print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
