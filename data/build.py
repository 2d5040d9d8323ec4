"""`python -m data.build`: a rule -> `runs/data/<rule>/{train,validation,test}.jsonl` and
`manifest.json`.

Knows nothing of prompts, tokenizers or models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

from data import manifest
from data.debate import debate
from data.debate.prompts import PROMPTS_FILE
from data.generator.words import WORDS_FILE
from data.ingest import Splitting
from data.long_turns import with_long_turns
from data.reviews import AND_REVIEWS
from data.rows import local_files
from data.sources import SOURCES, DataRequest, DataSource, own_rows, source_named
from data.splits import refuse_leaks
from guard.arguments import whole_number
from guard.calibration_rows import check_rows
from guard.conversation.example import GENERATOR, SPLITS, Example, write_examples
from guard.errors import GuardError, exits_cleanly
from guard.files.atomic import atomic_write, locked
from guard.home import ROOT, own_or_shipped
from guard.layout import Runs, fingerprint, is_current, mark_current, not_current
from guard.rule import (
    EDIT,
    MANIFEST_KEY,
    RULES,
    Rule,
    in_words,
    labelling,
    load_rule,
    rule_names,
    text_hash,
)

LOCK = "lock"  # in a rule's data folder


def build(request: DataRequest, *, force: bool = False) -> bool:
    """Write one rule's data set into the request's folder; return False if it was already there.

    Whatever goes wrong before the new splits are written leaves the data set that was there; an
    interrupted run with `force` goes on without. Raises GuardError on bad data.
    """
    rule, folder = request.rule, request.folder
    inputs = _inputs(request)
    was_current = is_current(folder, inputs)
    if was_current and _is_whole(folder) and not force:
        return False
    if force:
        not_current(folder)
    try:
        sourced = source_named(request.source).load(request)
        refuse_leaks(sourced.examples)
        if source_named(request.source).reads_splits:
            validation = [row for row in sourced.examples if row.split == "validation"]
            check_rows(validation, rule, where=request.source)
    except GuardError:
        if was_current:
            mark_current(folder, inputs)  # what was there is as good as it was
        raise
    examples = with_long_turns(sourced.examples, rule, request.seed)
    description = manifest.describe(examples)
    origin = {
        "rule_hash": text_hash(rule.text()),
        MANIFEST_KEY: labelling(rule),
        "source": request.source,
        "splits": request.splitting,
        "seed": request.seed,
        "sha256": write_splits(folder, examples),
    }
    manifest.save(folder, origin | description | sourced.notes)
    mark_current(folder, inputs)
    return True


def _inputs(request: DataRequest) -> str:
    """A fingerprint of all that a data set depends on; a file's name may say a split."""
    options = request.options.inputs() if request.options else []
    reviews = [request.reviews] if request.source.endswith(AND_REVIEWS) else []
    return fingerprint(
        request.rule.model_dump(mode="json", exclude={"gate"}),
        request.source,
        request.seed,
        request.splitting,
        [str(file) for file in local_files(own_rows(request.source))],
        *code_files(),
        *source_named(request.source).files(request.source),
        *[file for file in reviews if file.is_file()],
        *options,
    )


# What rows are read and written with besides this stage.
RENDERING = (
    *("conversation/chat.py", "conversation/example.py", "conversation/keys.py"),
    *("conversation/row.py", "rule.py", "prompt/encodings.py", "prompt/text.py"),
    *("files/strict_json.py", "files/text_file.py"),
)


def code_files() -> list[Path]:
    """The code that data sets are written with: all of this stage, and RENDERING."""
    data = [*sorted((ROOT / "data").rglob("*.py")), WORDS_FILE, PROMPTS_FILE]
    return [*data, *(ROOT / "guard" / name for name in RENDERING)]


def _is_whole(folder: Path) -> bool:
    names = [*(f"{split}.jsonl" for split in SPLITS), "manifest.json"]
    return all((folder / name).is_file() for name in names)


def write_splits(folder: Path, examples: list[Example]) -> dict[str, str]:
    """Write the splits, all or none of them; return their SHA-256."""
    sha256: dict[str, str] = {}
    with ExitStack() as renamed_at_the_end:
        for split in SPLITS:
            part = renamed_at_the_end.enter_context(atomic_write(folder / f"{split}.jsonl"))
            rows = [example for example in examples if example.split == split]
            sha256[split] = write_examples(part, rows)
        # Old and new splits must never stand side by side.
        for name in ("stage.json", *(f"{split}.jsonl" for split in SPLITS)):
            (folder / name).unlink(missing_ok=True)
    return sha256


@exits_cleanly
def main() -> None:
    """Build the data of every rule named; one rule's error leaves the others alone."""
    args = _arguments()
    names = rule_names(args.rule)
    if args.data and len(names) > 1:
        problem = "--data is the data of one rule"
        remedy = "Name one rule, or set `data:` in each rule's file"
        raise GuardError(problem, got=f"{len(names)} rules", remedy=remedy)
    errors = []
    for name in names:
        try:
            _build_one(name, args)
        except GuardError as error:
            errors.append(f"error: {name}: {error}")
    if errors:
        print(*errors, sep="\n", file=sys.stderr)
        sys.exit(2)


def _source_of(rule: Rule, earlier: Mapping[str, Any], named: str | None) -> str:
    """The command line decides, then the rule's file, then the manifest of last time.

    The generator that a rule has when nothing is said never replaces the data somebody has given;
    one that the rule's file names does.
    """
    if named or "data" in rule.model_fields_set:
        return named or rule.data
    return str(earlier.get("source", GENERATOR))


def _refuse_unread_flags(
    entry: DataSource, source: str, args: argparse.Namespace, *, is_kept: bool
) -> None:
    """Raise GuardError for an option that `entry` does not read, or not this time."""
    for candidate in SOURCES.values():
        for flag in candidate.flags:
            if getattr(args, flag) and flag not in entry.flags:
                problem = f"--{flag} is for data of another source: {candidate.description}"
                remedy = f"Say --data {candidate.shape} (DATA={candidate.shape})"
                raise GuardError(problem, got=source, remedy=remedy)
    if args.splits and not entry.reads_splits:
        problem = "--splits is for rows of your own: data of this source have splits of their own"
        raise GuardError(problem, got=source, remedy="Go without --splits (SPLITS=)")
    for flag in entry.flags:
        if is_kept and getattr(args, flag):
            problem = f"--{flag} would change nothing: these data stay until their source is named"
            remedy = f"Say --data {source} (DATA={source}) too"
            raise GuardError(problem, got=source, remedy=remedy)


def _build_one(name: str, args: argparse.Namespace) -> None:
    """Build one rule's data, and report them.

    The folder is held from before what is in it is read: an endpoint may write for hours, and what
    another command gives meanwhile must not be written over. Raises GuardError.
    """
    rule = load_rule(name)
    folder = Runs(args.runs).data(name)
    with locked(folder / LOCK, "another command is writing these data"):
        earlier = manifest.load(folder)
        source = _source_of(rule, earlier, args.data)
        entry = source_named(source)
        # What an endpoint wrote is written again only where it is asked for by name.
        is_kept = entry.is_paid and source not in (args.data, rule.data) and _is_whole(folder)
        _refuse_unread_flags(entry, source, args, is_kept=is_kept)
        splitting = args.splits
        if splitting is None and earlier.get("source") == source:
            splitting = earlier.get("splits")
        is_built = False
        if is_kept:
            debate.refuse_last_turn(rule)
        else:
            options = entry.options(rule, earlier, args) if entry.options else None
            request = DataRequest(rule, source, options, args.seed, splitting or "keep", folder)
            is_built = build(request, force=args.force)
        if source != earlier.get("source", source):
            reason = "as asked" if args.data else "as `data:` in its rule file says"
            print(f"{name}: the source was {earlier['source']} and is now {source}, {reason}")
        print(manifest.table(name, manifest.load(folder)))
        print(f"  {'written to' if is_built else 'unchanged in'} {folder}")
        for note in _notes(rule, source, is_kept=is_kept):
            print(f"  {note}")


def _notes(rule: Rule, source: str, *, is_kept: bool) -> Iterator[str]:
    if EDIT in in_words(rule):
        path = own_or_shipped(RULES / f"{rule.id}.yaml")
        yield f"{path} still says {EDIT}; a judge behind an endpoint reads these lines"
    if is_kept:
        yield f"an endpoint wrote these; DATA={source} asks it again for what has changed"


UNNAMED = """\
Without --data the source is the rule file's `data:` key; without that, the one
that the rule's data came from last time, at first the offline generator."""


def _arguments() -> argparse.Namespace:
    width = max(len(source.shape) for source in SOURCES.values())
    sources = [f"  {source.shape:<{width}}  {source.description}" for source in SOURCES.values()]
    parser = argparse.ArgumentParser(
        prog="python -m data.build",
        description="Write the training, validation and test examples of a rule.",
        epilog="\n".join(["sources:", *sources, UNNAMED]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rule = "a rule's name, several separated by commas, or all"
    parser.add_argument("--rule", required=True, help=rule)
    parser.add_argument("--data", metavar="SOURCE", help="where the examples come from, see below")
    parser.add_argument("--seed", type=whole_number, default=0, help="same seed, same bytes")
    flags: dict[str, Mapping[str, Any]] = {}
    for source in SOURCES.values():
        flags |= source.flags
    for flag, settings in flags.items():
        parser.add_argument(f"--{flag}", **settings)
    splits = (
        "the splits of your own data: keep them and refuse leaks (default; later as last time), "
        "or assign all rows to new splits"
    )
    parser.add_argument("--splits", choices=get_args(Splitting), help=splits)
    parser.add_argument("--runs", type=Path, default=Runs().root, help="output folder")
    parser.add_argument("--force", action="store_true", help="write again although nothing changed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
