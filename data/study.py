"""The rows of a study: `python -m data.study transfer --rule RULE --data FILE`.

A file's rows are assigned to test rows and a pool; each point draws its rows from the pool and is
tested on the same test rows. In a `transfer` every point also has the offline generator's rows, for
training, validation and test; with 0 rows drawn nothing real is trained, calibrated or chosen on.
Knows nothing of models.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from data.build import code_files, has_splits, write_splits
from data.generator.generate import Counts
from data.generator.library import phrase_files, rules_with_phrases
from data.ingest import ingest
from data.rows import read_rows
from data.sources import generated, in_pairs
from data.splits import refuse_copies, refuse_leaks
from guard.arguments import count, whole_numbers
from guard.conversation.example import FEWEST_ROWS, Example, Split, read_examples
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs, fingerprint, is_current, mark_current, not_current, split_files
from guard.rule import RULES, Rule, check_labelling, load_rule
from guard.study import (
    ORIGIN,
    Origin,
    Study,
    StudyKind,
    StudyPoint,
    add_study_arguments,
    load_study,
    point_runs,
    study_folder,
)

# The shares of a file's rows. The test has more than a rule's own, to tell differences apart.
STUDY_SHARES: dict[Split, float] = {"train": 0.48, "validation": 0.12, "test": 0.4}
TEST_ROWS = 1000
VALIDATION_SHARE = 0.2  # of the rows that a point draws
ALL_ROWS = 10**9
SIZES: dict[StudyKind, tuple[int, ...]] = {
    "transfer": (0, 20, 50, 100),
    "curve": (50, 100, 300, 1000, ALL_ROWS),
}


@dataclass(frozen=True)
class Pools:
    """Rows by their use: every point has `common` and draws from `pool`; all are tested on `test`.
    `common` and `pool` hold rows of training and validation, told apart by their split.
    """

    common: tuple[Example, ...]
    pool: tuple[Example, ...]
    test: tuple[Example, ...]


@dataclass(frozen=True)
class StudyRequest:
    """What a study is asked for. A point draws `sizes` rows, a part of them for validation; a
    number above the rows that there are draws all.
    """

    kind: StudyKind
    rule: Rule
    data: Path | None
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    test_rows: int
    generated: Counts
    runs: Runs

    @property
    def own_rows(self) -> Path:
        return self.runs.data(self.rule.id)


def build_study(request: StudyRequest) -> Study:
    """Write every point's splits and `study.json`, where something changed. Raises GuardError."""
    if request.data is not None and not request.data.is_file():
        remedy = "Name a file of labelled rows of this machine: .jsonl, .jsonl.gz or .csv"
        raise GuardError("no such file", where=request.data, remedy=remedy)
    folder = study_folder(request.runs.root, request.kind, request.rule.id, request.data)
    _refuse_other_file(folder, request.data)
    inputs = _inputs(request)
    if is_current(folder, inputs):
        study = load_study(folder)
        if all(has_splits(point_runs(folder, it).data(study.rule)) for it in study.points):
            return study
    pools = _pools(request)
    sizes = _sizes(request, len(pools.pool))
    not_current(folder)  # while the folder mixes points of two requests
    pairs = itertools.product(sizes, request.seeds)
    points = [StudyPoint(rows=size, seed=seed) for size, seed in pairs]
    for point in tqdm(points, desc="rows of the points", unit="point", leave=False):
        rows = [*pools.common, *drawn(pools.pool, point.rows, point.seed), *pools.test]
        write_splits(point_runs(folder, point).data(request.rule.id), rows)
    study = Study(
        kind=request.kind,
        rule=request.rule.id,
        data=request.data.name if request.data else None,
        path=str(request.data.resolve()) if request.data else None,
        points=tuple(points),
    )
    study.save(folder)
    mark_current(folder, inputs)
    return study


def _refuse_other_file(folder: Path, data: Path | None) -> None:
    """Raise GuardError for the study of another file; the same one may have been moved."""
    try:
        earlier = load_study(folder)
    except GuardError:  # none, or one that no stage can read any more
        return
    if data is None:
        return
    is_other = earlier.data != data.name
    if earlier.path is not None and Path(earlier.path).exists():
        is_other = is_other or not data.samefile(earlier.path)
    if is_other:
        raise GuardError(
            "the folder holds the study of another file, whose weights and report would be lost",
            where=folder,
            got=f"{earlier.path or earlier.data}, not {data}",
            remedy="Rename one of the two files, up to its first dot, or move this folder away",
        )


def drawn(pool: Sequence[Example], rows: int, seed: int) -> list[Example]:
    """`rows` of the pool, a fifth of them from its validation rows, labels in the pool's shares.

    A smaller draw with the same seed is a part of a larger one. Either label has FEWEST_ROWS in
    either split, or none where `rows` is 0; all of the pool's rows are the pool.
    """
    if rows == 0:
        return []
    if rows >= len(pool):
        return list(pool)
    available = Counter(row.split for row in pool)
    wanted = max(round(VALIDATION_SHARE * rows), 2 * FEWEST_ROWS, rows - available["train"])
    validation = min(wanted, available["validation"])
    sizes: dict[Split, int] = {"validation": validation, "train": rows - validation}
    violating_share = sum(example.label for example in pool) / len(pool)
    chosen: list[Example] = []
    for split, size in sizes.items():
        by_label: dict[int, list[Example]] = {0: [], 1: []}
        for row in pool:
            if row.split == split:
                by_label[row.label].append(row)
        smallest = max(FEWEST_ROWS, size - len(by_label[0]))
        largest = min(size - FEWEST_ROWS, len(by_label[1]))
        violating = min(max(round(violating_share * size), smallest), largest)
        for label, quota in ((1, violating), (0, size - violating)):
            random.Random(f"{seed}/{split}/{label}").shuffle(by_label[label])
            chosen += by_label[label][:quota]
    return chosen


def _inputs(request: StudyRequest) -> str:
    files = [request.data]
    if not request.data:
        files = list(split_files(request.own_rows))
    if request.kind == "transfer":
        files += [*phrase_files(), *rules_with_phrases(RULES)]
    return fingerprint(
        request.kind,
        request.rule.model_dump(mode="json", exclude={"gate"}),
        [request.sizes, request.seeds, request.test_rows, request.generated.inputs()],
        *files,
        *code_files(),
    )


def _sizes(request: StudyRequest, available: int) -> list[int]:
    """The numbers of rows to draw, ascending, none above `available`. Raises GuardError."""
    smallest = 4 * FEWEST_ROWS
    allows_zero = request.kind == "transfer"
    for size in request.sizes:
        if size < smallest and not (size == 0 and allows_zero):
            remedy = f"Name numbers of rows from {smallest}, for a transfer also 0"
            raise GuardError("too few rows to draw", got=size, remedy=remedy)
    return sorted({min(size, available) for size in request.sizes})


def _pools(request: StudyRequest) -> Pools:
    where = request.own_rows
    if request.data is None:
        examples = _own_examples(request)
    else:
        where = request.data
        rows = read_rows(str(where))
        examples = ingest(rows, str(where), request.rule, 0, "new", STUDY_SHARES).examples
    real = [_of_origin(example, "real") for example in examples]
    test = _limited([row for row in real if row.split == "test"], request.test_rows)
    pool = tuple(row for row in real if row.split != "test")
    _refuse_scarce(test, where)
    if request.kind == "curve":
        return Pools((), pool, test)
    written = generated(request.rule, request.generated, 0)
    generated_rows = [_of_origin(example, "generated") for example in written]
    refuse_copies(generated_rows, [*pool, *test], str(where))
    refuse_leaks([*pool, *test, *generated_rows])
    common = tuple(row for row in generated_rows if row.split != "test")
    generated_test = [row for row in generated_rows if row.split == "test"]
    return Pools(common, pool, (*test, *generated_test))


def _own_examples(request: StudyRequest) -> list[Example]:
    """The rule's rows as `make data` left them. Raises GuardError where they are none for this."""
    if request.kind == "transfer":
        remedy = "Name a file of labelled rows: make transfer RULE=… DATA=FILE"
        raise GuardError("a transfer is tested on real rows", remedy=remedy)
    check_labelling(request.own_rows, request.rule)
    files = split_files(request.own_rows)
    rows = list(itertools.chain.from_iterable(map(read_examples, files)))
    if len({row.is_generated for row in rows}) > 1:
        remedy = "Name your own file: make curve RULE=… DATA=FILE"
        raise GuardError("some rows of the rule are generated, others are your own", remedy=remedy)
    return rows


def _refuse_scarce(test: Sequence[Example], where: Path) -> None:
    """Raise GuardError for test rows that rank nothing, before anything is trained."""
    counts = Counter(row.label for row in test)
    if min(counts[0], counts[1]) < FEWEST_ROWS:
        raise GuardError(
            f"the test needs at least {FEWEST_ROWS} rows of each label",
            where=where,
            got=f"{counts[1]} that violate, {counts[0]} that do not",
            remedy="Test on more rows with OPTIONS='--test 1000', or make the groups smaller",
        )


def _of_origin(example: Example, origin: Origin) -> Example:
    identity, group = f"{origin}/{example.id}", f"{origin}/{example.group}"
    return replace(example, id=identity, group=group, meta=example.meta | {ORIGIN: origin})


def _limited(rows: Sequence[Example], limit: int) -> tuple[Example, ...]:
    """At most `limit` rows of whole groups, drawn with a fixed seed; else the smallest group."""
    sizes = Counter(row.group for row in rows)
    groups = sorted(sizes)
    random.Random(0).shuffle(groups)
    chosen: set[str] = set()
    room = limit
    for group in groups:
        if sizes[group] <= room:
            chosen.add(group)
            room -= sizes[group]
    if sizes and not chosen:
        chosen.add(min(groups, key=lambda group: sizes[group]))
    return tuple(row for row in rows if row.group in chosen)


def row_counts(text: str) -> tuple[int, ...]:
    return whole_numbers(re.sub(r"\ball\b", str(ALL_ROWS), text))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m data.study",
        description="The rows of a study: test rows, and for each point what it is trained on.",
    )
    add_study_arguments(parser)
    sizes = "numbers of rows to draw (default 0,20,50,100; for a curve 50,100,300,1000,all)"
    parser.add_argument("--rows", type=row_counts, help=sizes)
    seeds = "seeds of draws and trainings, separated by commas (default 0,1,2)"
    parser.add_argument("--seeds", type=whole_numbers, default=(0, 1, 2), help=seeds)
    test = f"the most test rows of the file (default {TEST_ROWS})"
    parser.add_argument("--test", type=count, default=TEST_ROWS, help=test)
    for split, rows in vars(Counts()).items():
        generated = f"generated rows of a transfer (default {rows})"
        parser.add_argument(f"--generated-{split}", type=in_pairs, default=rows, help=generated)
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    args = _arguments()
    request = StudyRequest(
        kind=args.kind,
        rule=load_rule(args.rule),
        data=args.data,
        sizes=args.rows or SIZES[args.kind],
        seeds=args.seeds,
        test_rows=args.test,
        generated=Counts(args.generated_train, args.generated_validation, args.generated_test),
        runs=Runs(args.runs),
    )
    study = build_study(request)
    seeds = len({point.seed for point in study.points})
    sizes = ", ".join(f"{size:,}" for size in study.sizes)
    print(f"{study.kind} of {study.rule}: {sizes} rows, {seeds} seeds each")


if __name__ == "__main__":
    main()
