"""`python -m data.build`: a rule -> `runs/data/<rule>/{train,validation,test}.jsonl` and `manifest.json`.

Knows nothing of prompts, tokenizers or models.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from data import manifest
from data.debate import debate as barred
from data.generator.generate import Counts, generate, load_corpus
from data.generator.phrasebook import PHRASES
from data.ingest import (
    HUB,
    BadRow,
    Splitting,
    conversation,
    ingest,
    is_hub_id,
    local_files,
    read_rows,
)
from data.llm_reply import WRITING
from data.splits import refuse_leaks
from guard.endpoint.client import Endpoint
from guard.endpoint.settings import endpoint_settings, price
from guard.errors import GuardError, exits_cleanly
from guard.example import SPLITS, Message, write_examples
from guard.files.atomic import atomic_write
from guard.layout import Runs, fingerprint, is_current, mark_current
from guard.rule import EDIT, RULES, Rule, in_words, load_rule, rule_names, text_hash

UNLABELLED = 30  # conversations that the policy's dimensions are found with (BARRED: 10 to 30)
EXAMPLES = 1000
GENERATOR = "generator"
LLM = "llm"


@dataclass(frozen=True)
class Writers:
    """Who writes `llm` data: the endpoint of the GENERATOR_… variables, how many rows, with which unlabelled conversations in view."""

    endpoint: Endpoint
    wanted: int
    unlabelled: str
    seeds: tuple[tuple[Message, ...], ...]
    budget_usd: float | None


def build(
    rule: Rule,
    source: str,
    counts: Counts,
    seed: int,
    splitting: Splitting,
    folder: Path,
    *,
    writers: Writers | None = None,
    force: bool = False,
) -> bool:
    """Write one rule's data set into `folder`; return False if it was already there. Raises GuardError on bad data.

    `llm` data need `writers`; every answer that they are paid for is kept in `answers.jsonl` there, `force` or not.

    Whatever goes wrong before the new splits are written leaves the data set that was there. A hub id is read once: nothing here
    tells when it changes, and `force` reads it again.
    """
    names = [
        str(file) for file in local_files(source)
    ]  # in a folder a file's name may say its split
    inputs = fingerprint(
        rule.model_dump(mode="json"),
        source,
        vars(counts),
        seed,
        splitting,
        names,
        *_files_read(source),
        *_asked(writers),
    )
    if (
        not force
        and is_current(folder, inputs)
        and all((folder / f"{split}.jsonl").is_file() for split in SPLITS)
    ):
        return False
    debated: dict[str, Any] = {}
    if source == GENERATOR:
        examples, dropped = (
            generate(
                load_corpus(rule, [load_rule(path.stem) for path in rules_with_phrases()]),
                counts,
                seed,
            ),
            0,
        )
    elif writers:
        kept = folder / "answers.jsonl"
        examples, statistics = barred.generate(
            rule, writers.wanted, seed, writers.endpoint, writers.seeds, kept, writers.budget_usd
        )
        dropped, debated = (
            0,
            {"debate": statistics, "examples": writers.wanted, "unlabelled": writers.unlabelled},
        )
    else:
        ingested = ingest(source, rule, seed, splitting)
        examples, dropped = ingested.examples, ingested.dropped
    refuse_leaks(examples)
    described = manifest.describe(examples)
    with ExitStack() as renamed_at_the_end:
        parts = {
            split: renamed_at_the_end.enter_context(atomic_write(folder / f"{split}.jsonl"))
            for split in SPLITS
        }
        sha256 = {
            split: write_examples(part, [e for e in examples if e.split == split])
            for split, part in parts.items()
        }
        for name in (
            "stage.json",
            *(f"{split}.jsonl" for split in SPLITS),
        ):  # old and new splits must never stand side by side
            (folder / name).unlink(missing_ok=True)
    origin = {
        "rule_hash": text_hash(rule.text()),
        "source": source,
        "splits": splitting,
        "dropped": dropped,
        "seed": seed,
        "sha256": sha256,
    }
    manifest.save(folder, origin | described | debated)
    mark_current(folder, inputs)
    return True


def _asked(writers: Writers | None) -> list[Any]:
    """What `llm` data depend on besides the rule: not what it may cost."""
    if writers is None:
        return []
    seeds = [
        [[message.role, message.content] for message in messages] for messages in writers.seeds
    ]
    return [writers.endpoint.identity[:3], writers.wanted, seeds]


def _writers(rule: Rule, before: Mapping[str, Any], args: argparse.Namespace) -> Writers:
    """As asked for, else as last time. Raises GuardError where no endpoint is described, or a file of unlabelled conversations is none."""
    settings = endpoint_settings(os.environ, "generator", "for data of another source")
    if settings is None:
        remedy = "Set GENERATOR_BASE_URL, GENERATOR_MODEL and, if it needs one, GENERATOR_API_KEY: any OpenAI-compatible endpoint"
        raise GuardError("no endpoint is described that could write examples", remedy=remedy)
    if EDIT in in_words(rule):
        raise GuardError(
            f"the rule still says {EDIT}",
            where=RULES / f"{rule.id}.yaml",
            remedy="Write there what violates it and what it allows",
        )
    budget = os.environ.get("GENERATOR_BUDGET_USD", "")
    try:
        budget_usd = price(budget) if budget else None
    except ValueError as error:
        raise GuardError(
            f"GENERATOR_BUDGET_USD has a bad value: {error}",
            got=budget,
            remedy="USD, for example 5",
        ) from error
    unlabelled = str(args.unlabelled) if args.unlabelled else before.get("unlabelled", "")
    seeds = _seeds(unlabelled, rule) if unlabelled else ()
    endpoint = Endpoint(**WRITING | settings)
    return Writers(
        endpoint, args.examples or before.get("examples", EXAMPLES), unlabelled, seeds, budget_usd
    )


def _seeds(unlabelled: str, rule: Rule) -> tuple[tuple[Message, ...], ...]:
    seeds = []
    for row in itertools.islice(read_rows(unlabelled), UNLABELLED):
        try:
            if row.problem:
                raise BadRow(row.problem)
            seeds.append(conversation(row.fields, rule))
        except (BadRow, GuardError) as error:
            raise GuardError(
                f"no conversation: {error}",
                where=row.where,
                remedy="One conversation a row, as for DATA=",
            ) from error
    if not seeds:
        raise GuardError(
            "no conversations", where=unlabelled, remedy="One conversation a row, as for DATA="
        )
    return tuple(seeds)


def rules_with_phrases() -> list[Path]:
    """The files of the rules that the offline generator can write data for."""
    return [path for path in sorted(RULES.glob("*.yaml")) if (PHRASES / path.name).is_file()]


def _files_read(source: str) -> list[Path]:
    """What a data set depends on besides its arguments: this stage's code, and the phrases and their rules, or the files read."""
    code = sorted(Path(__file__).parent.rglob("*.py"))
    return (
        [*code, *sorted(PHRASES.glob("*.yaml")), *rules_with_phrases()]
        if source == GENERATOR
        else [*code, *local_files(source)]
    )


@exits_cleanly
def main() -> None:
    """Parse the command line and build the data of every rule asked for; one rule's error leaves the others alone."""
    args = _arguments()
    names = rule_names(args.rule)
    if args.data and len(names) > 1:
        raise GuardError(
            "--data is the data of one rule",
            got=f"{len(names)} rules",
            remedy="Name one rule, or set `data:` in each rule's file",
        )
    errors = []
    for name in names:
        try:
            _build_one(name, args)
        except GuardError as error:
            errors.append(f"error: {error}")
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
        sys.exit(2)


def _build_one(name: str, args: argparse.Namespace) -> None:
    rule = load_rule(name)
    folder = Runs(args.runs).data(name)
    before = manifest.load(folder)
    # The generator is only what a rule has when nothing is said, so it never replaces the data somebody has brought.
    source = args.data or (before.get("source", GENERATOR) if rule.data == GENERATOR else rule.data)
    earlier = before.get("source", source)
    splitting: Splitting = (
        args.splits or (before.get("splits") if before.get("source") == source else None) or "keep"
    )
    counts = Counts(args.train, args.validation, args.test)
    if (args.unlabelled or args.examples) and source != LLM:
        what = "--unlabelled and --examples are for data that an endpoint writes"
        raise GuardError(what, got=source, remedy=f"Say --data {LLM} (DATA={LLM})")
    # What an endpoint wrote is paid for anew only if that is asked for by name.
    is_kept = (
        source == LLM
        and LLM not in (args.data, rule.data)
        and all((folder / f"{split}.jsonl").is_file() for split in SPLITS)
    )
    writers = _writers(rule, before, args) if source == LLM and not is_kept else None
    built = not is_kept and build(
        rule, source, counts, args.seed, splitting, folder, writers=writers, force=args.force
    )
    if source != earlier:
        print(
            f"{name}: the source was {earlier} and is now {source}, {'as asked' if args.data else 'as `data:` in its rule file says'}"
        )
    print(manifest.table(name, manifest.load(folder)))
    print(f"  {'written to' if built else 'unchanged in'} {folder}")
    if EDIT in in_words(rule):
        print(
            f"  {RULES / f'{name}.yaml'} still says {EDIT}; a judge behind an endpoint reads these lines"
        )
    if is_kept:
        print(f"  an endpoint wrote these; DATA={LLM} asks it again for what has changed")
    if not built and is_hub_id(source):
        print("  a hub data set is read once; FORCE=1 reads it again")


def _arguments() -> argparse.Namespace:
    default = Counts()
    parser = argparse.ArgumentParser(
        prog="python -m data.build",
        description="Write the training, validation and test examples of a rule.",
        epilog="Without --data the source is the rule file's `data:` key; without that, the one that the rule's data came from last time, "
        "at first the offline generator.",
    )
    parser.add_argument(
        "--rule", required=True, help="a rule's name, several separated by commas, or all"
    )
    parser.add_argument(
        "--data",
        metavar="SOURCE",
        help=f"your own data: a .jsonl, .jsonl.gz or .csv file, {HUB}ORG/NAME; '{LLM}': written and debated by the endpoint of "
        f"GENERATOR_BASE_URL, GENERATOR_MODEL, GENERATOR_API_KEY, within GENERATOR_BUDGET_USD; or '{GENERATOR}'",
    )
    parser.add_argument(
        "--examples",
        type=_wanted,
        help=f"for '{LLM}': rows to write (default: as last time, at first {EXAMPLES})",
    )
    parser.add_argument(
        "--unlabelled",
        type=Path,
        help=f"for '{LLM}': a file as for --data, labels or not; its first {UNLABELLED} rows show what occurs",
    )
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    for split in SPLITS:
        parser.add_argument(
            f"--{split}",
            type=_even,
            default=getattr(default, split),
            help=f"generated rows (default {getattr(default, split)})",
        )
    parser.add_argument(
        "--splits",
        choices=get_args(Splitting),
        help="the splits of your own data: keep them and refuse leaks (default; later as last time), clean leaks out of the earlier split, "
        "or deal out anew",
    )
    parser.add_argument(
        "--runs", type=Path, default=Runs().root, help="output folder (default runs/)"
    )
    parser.add_argument("--force", action="store_true", help="write again although nothing changed")
    return parser.parse_args()


def _wanted(text: str) -> int:
    count = int(text)
    if count < 20 or count % 2:
        raise argparse.ArgumentTypeError(f"must be even and at least 20, got {text}")
    return count


def _even(text: str) -> int:
    """Generated conversations come in pairs, and the test in two strata of pairs."""
    count = int(text)
    if count < 4 or count % 4:
        raise argparse.ArgumentTypeError(f"must be a positive multiple of 4, got {text}")
    return count


if __name__ == "__main__":
    main()
