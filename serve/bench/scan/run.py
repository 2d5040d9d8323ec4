"""A scan of stored conversations by random aLoRAs: against the engine alone, killed, and on Ray.

`throughput`: the scan against the same conversations sent straight into the engine, by turns.
`killed`: `make scan` killed by SIGKILL at random moments and continued, against one left alone.
`cluster`: without Ray, by one actor, and by two on the same cores. Random weights judge nothing;
only times and outputs are compared. Knows nothing of HTTP.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from guard.layout import Runs
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count, add_parts
from serve.bench.report import origin, publish
from serve.bench.scan.kills import measure_kills
from serve.bench.scan.measure import measure_throughput
from serve.bench.scan.report import ClusterRow, KilledRow, ScanReport, ThroughputRow, table
from serve.bench.scan.stored import METHOD, save_rows, save_rules, stored_rows
from serve.scan.manifest import ScanManifest, manifest_of
from serve.scan.options import ROWS_A_PART, check_ray
from serve.scan.sources import find_sources
from serve.selection import Selection, ServedPart, served_parts

PARTS = ("throughput", "killed", "cluster")
CONVERSATIONS, QUICK_CONVERSATIONS = 20_000, 400
RULES = 15
KILLS = 10
REPEATS = 2
ACTORS = (0, 1, 2)
KILLED_PARTS = 40  # files of a scan that is killed: it loses one at each kill
CLUSTER_PARTS = 20


class ScanBench:
    """Measures in a scratch folder that holds conversations and adapters."""

    def __init__(self, recipe: Recipe, scratch: Path, conversations: int) -> None:
        self.recipe = recipe
        self.scratch = scratch
        self.conversations = conversations
        self.files = save_rows(scratch, stored_rows(conversations))
        self.runs = Runs(scratch / "runs")
        save_rules(self.runs, recipe, RULES)
        selection = Selection(recipe.name, method=METHOD, runs=self.runs)
        self.parts: list[ServedPart] = served_parts(selection)

    def throughput(self, repeats: int) -> ThroughputRow:
        """Measure scan and engine by turns."""
        rows = min(ROWS_A_PART, self.rows_a_part(2))
        return measure_throughput(self.parts, self._manifest(rows), self.scratch, repeats)

    def killed(self, kills: int) -> KilledRow:
        """Measure a scan that is killed, and one that is not."""
        rows = self.rows_a_part(KILLED_PARTS)
        return measure_kills(self.files, self.runs.root, self.recipe.name, rows, kills)

    def cluster(self) -> tuple[ClusterRow, ...]:
        """Measure scans without Ray, by one actor and by two."""
        from serve.bench.scan.cluster import measure_cluster  # which imports Ray

        manifest = self._manifest(self.rows_a_part(CLUSTER_PARTS))
        rows: list[ClusterRow] = []
        for actors in ACTORS:
            rows.append(measure_cluster(self.parts, manifest, self.scratch, actors))
        return tuple(rows)

    def rows_a_part(self, parts: int) -> int:
        """The rows of a part, if there are to be `parts` parts."""
        return -(-self.conversations // parts)

    def _manifest(self, rows_a_part: int) -> ScanManifest:
        sources = find_sources([str(file) for file in self.files])
        return manifest_of(self.parts, sources, rows_a_part, "jsonl")


def run(
    recipe: Recipe, chosen: list[str], conversations: int, kills: int, repeats: int
) -> ScanReport:
    """Measure the chosen parts. Raises GuardError as they do."""
    killed: KilledRow | None = None
    throughput: ThroughputRow | None = None
    cluster: tuple[ClusterRow, ...] = ()
    with tempfile.TemporaryDirectory(prefix="scan-bench-") as scratch:
        bench = ScanBench(recipe, Path(scratch), conversations)
        if "cluster" in chosen:
            cluster = bench.cluster()
        if "killed" in chosen:
            killed = bench.killed(kills)
        if "throughput" in chosen:
            throughput = bench.throughput(repeats)
    return ScanReport(
        **origin(recipe), rules=RULES, killed=killed, throughput=throughput, cluster=cluster
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    add_parts(parser, PARTS)
    add_count(parser, "--conversations", CONVERSATIONS, "number of stored conversations")
    add_count(parser, "--kills", KILLS, "how often a scan is killed")
    add_count(parser, "--repeats", REPEATS, "turns of engine and scan")
    quick = f"{QUICK_CONVERSATIONS} conversations, whatever the other options say"
    parser.add_argument("--quick", action="store_true", help=quick)


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and print the table."""
    if "cluster" in arguments.parts:
        check_ray()
    conversations = QUICK_CONVERSATIONS if arguments.quick else arguments.conversations
    recipe = load_recipe(arguments.model)
    report = run(recipe, arguments.parts, conversations, arguments.kills, arguments.repeats)
    publish(report, arguments.runs / "scan_bench.json", table)
