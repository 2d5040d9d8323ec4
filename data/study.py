"""The rows of a study: `python -m data.study --rule RULE --data FILE`.

A file's rows are assigned to test rows and a pool; each point draws its rows from the pool and is
tested on the same test rows. Of `generator+FILE` every point also has the offline generator's rows
of training and validation; with 0 rows drawn nothing real is trained, calibrated or chosen on.
Of a FILE alone 0 rows leave the test rows, which a base's reader answers. Knows nothing of models.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from data.build import write_splits
from data.generator.generate import Counts
from data.ingest import ingest
from data.rows import read_rows
from data.sources import generated, in_pairs, own_rows
from data.splits import refuse_copies, refuse_leaks
from guard.arguments import count, whole_numbers
from guard.conversation.example import FEWEST_ROWS, GENERATOR_AND, Example, Split
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs
from guard.rule import Rule, load_rule
from guard.study import Study, StudyPoint, add_study_arguments, is_mixed, point_runs, study_folder

# The shares of a file's rows. The test has more than a rule's own, to tell differences apart.
STUDY_SHARES: dict[Split, float] = {"train": 0.48, "validation": 0.12, "test": 0.4}
TEST_ROWS = 1000
VALIDATION_SHARE = 0.2  # of the rows that a point draws
ALL_ROWS = 10**9
SIZES = (50, 100, 300, 1000, ALL_ROWS)
MIXED_SIZES = (0, 20, 50, 100)  # beside generated rows


@dataclass(frozen=True)
class StudyRequest:
    """What a study is asked for. A point draws `sizes` rows, a part of them for validation; a
    number above the rows that there are draws all. No `generated` row is tested on.
    """

    rule: Rule
    data: str
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    test_rows: int
    generated: Counts
    runs: Runs


def build_study(request: StudyRequest) -> Study:
    """Write every point's splits and `study.json`: the same bytes where nothing changed, so that
    what was trained on them stays. Raises GuardError.
    """
    if request.rule.compose:
        problem, remedy = "no rows train a composed rule", "Name one of its parents"
        raise GuardError(problem, got=request.rule.id, remedy=remedy)
    test, pool = _own_rows(request)
    common = _generated_rows(request, [*pool, *test])
    pairs = itertools.product(_sizes(request, len(pool)), request.seeds)
    points = [StudyPoint(rows=size, seed=seed) for size, seed in pairs]
    folder = study_folder(request.runs.root, request.rule.id, request.data)
    for point in tqdm(points, desc="rows of the points", unit="point", leave=False):
        rows = [*common, *drawn(pool, point.rows, point.seed), *test]
        write_splits(point_runs(folder, point).data(request.rule.id), rows)
    study = Study(rule=request.rule.id, data=request.data, points=tuple(points))
    study.save(folder)
    return study


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


def _sizes(request: StudyRequest, available: int) -> list[int]:
    """The numbers of rows to draw, ascending, none above `available`. Raises GuardError."""
    smallest = 4 * FEWEST_ROWS
    for size in request.sizes:
        if 0 < size < smallest:
            remedy = f"Name 0 or numbers of rows from {smallest}"
            raise GuardError("too few rows to draw", got=size, remedy=remedy)
    return sorted({min(size, available) for size in request.sizes})


def _own_rows(request: StudyRequest) -> tuple[list[Example], list[Example]]:
    """The source's rows: those of the test, and those to draw from. Raises GuardError."""
    source = own_rows(request.data)
    examples = ingest(read_rows(source), source, request.rule, 0, "new", STUDY_SHARES).examples
    real = [_of_origin(example, "real") for example in examples]
    test = _limited([row for row in real if row.split == "test"], request.test_rows)
    counts = Counter(row.label for row in test)
    if min(counts[0], counts[1]) < FEWEST_ROWS:
        problem = f"the test needs at least {FEWEST_ROWS} rows of each label"
        got = f"{counts[1]} that violate, {counts[0]} that do not"
        remedy = "Test on more rows with OPTIONS='--test 1000', or make the groups smaller"
        raise GuardError(problem, where=source, got=got, remedy=remedy)
    return test, [row for row in real if row.split != "test"]


def _generated_rows(request: StudyRequest, real: Sequence[Example]) -> list[Example]:
    """The rows that every point has. Raises GuardError where one is in the `real` rows too."""
    if not is_mixed(request.data):
        return []
    written = generated(request.rule, request.generated, 0)
    rows = [_of_origin(example, "generated") for example in written]
    refuse_copies(rows, real, own_rows(request.data))
    refuse_leaks([*real, *rows])
    return rows


def _of_origin(example: Example, origin: str) -> Example:
    return replace(example, id=f"{origin}/{example.id}", group=f"{origin}/{example.group}")


def _limited(rows: Sequence[Example], limit: int) -> list[Example]:
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
    return [row for row in rows if row.group in chosen]


def row_counts(text: str) -> tuple[int, ...]:
    return whole_numbers(re.sub(r"\ball\b", str(ALL_ROWS), text))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m data.study",
        description="The rows of a study: test rows, and for each point what it is trained on.",
    )
    add_study_arguments(parser)
    sizes = f"rows to draw (default 50,100,300,1000,all; of {GENERATOR_AND}FILE 0,20,50,100)"
    parser.add_argument("--rows", type=row_counts, help=sizes)
    seeds = "seeds of draws and trainings, separated by commas (default 0,1,2)"
    parser.add_argument("--seeds", type=whole_numbers, default=(0, 1, 2), help=seeds)
    test = f"the most test rows of the file (default {TEST_ROWS})"
    parser.add_argument("--test", type=count, default=TEST_ROWS, help=test)
    counts = Counts()
    for split, rows in (("train", counts.train), ("validation", counts.validation)):
        beside = f"generated rows beside those of the file (default {rows})"
        parser.add_argument(f"--generated-{split}", type=in_pairs, default=rows, help=beside)
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    args = _arguments()
    request = StudyRequest(
        rule=load_rule(args.rule),
        data=args.data,
        sizes=args.rows or (MIXED_SIZES if is_mixed(args.data) else SIZES),
        seeds=args.seeds,
        test_rows=args.test,
        generated=Counts(args.generated_train, args.generated_validation, test=0),
        runs=Runs(args.runs),
    )
    study = build_study(request)
    seeds = len({point.seed for point in study.points})
    sizes = ", ".join(f"{size:,}" for size in study.sizes)
    print(f"curve of {study.rule}: {sizes} rows, {seeds} seeds each")


if __name__ == "__main__":
    main()
