"""The fleet benchmarks' numbers: the JSON file, the table in the terminal, the plot.

Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from guard.files.yaml_file import Strict
from guard.method import METHODS
from serve.bench.plot import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    new_figure,
    plot_spreads,
    save_figure,
)
from serve.bench.report import BenchReport, Spread, notes, source

SLOTS = 32
# Adapters in the PEFT baseline's LRU: as many as in Pioneer's comparison.
CAPACITY = 25
PEFT, ONE_SLOT, ALL_RESIDENT, BARE_BASE = "PEFT baseline", "1 slot", "all resident", "bare base"
# Server -> its colour and marker
SERVERS: dict[str, tuple[str, str]] = {
    PEFT: (BLUE, "o"),
    ONE_SLOT: (PINK, "s"),
    f"{CAPACITY} slots": (SKY, "P"),
    f"{SLOTS} slots": (VERMILION, "D"),
    ALL_RESIDENT: (ORANGE, "^"),
    BARE_BASE: (GREEN, "v"),
}


class FleetRow(Strict):
    """One server under one cell's traffic. Latencies are those of the requests of all repeats."""

    server: str
    method: str
    adapters: int
    alpha: float | None  # exponent of Zipf's law; None: round-robin
    requests: int
    working_set: int  # adapters that got a request, in the median repeat
    requests_per_second: Spread
    p50_ms: float
    p95_ms: float
    p99_ms: float
    forward_passes: int | None = None  # one for each batch; older reports do not state them
    adapter_loads: int  # from disk
    swap_ins: int  # into a slot (engine) or a place of the LRU (PEFT)
    adapter_mib: float
    computed_tokens: int

    @property
    def loaded_mib(self) -> float:
        """The size of what was read from disk."""
        return self.adapter_loads * self.adapter_mib

    @property
    def swapped_in_mib(self) -> float:
        """The size of what was copied into slots or places."""
        return self.swap_ins * self.adapter_mib

    @property
    def traffic(self) -> tuple[str, int, float | None]:
        """A key that is equal for the servers that got the same requests."""
        return self.method, self.adapters, self.alpha


class FleetReport(BenchReport):
    """Everything in `runs/adapters_bench.json` or `runs/fleet_bench.json`."""

    workers: int
    conversation_tokens: int
    repeats: int
    engine: dict[str, str]
    rows: tuple[FleetRow, ...]

    def throughput_share(self, row: FleetRow, server: str) -> str:
        """The row's throughput in percent of another server's with the same traffic; empty where
        that server was not measured.
        """
        for baseline_row in self.rows:
            if (baseline_row.server, baseline_row.traffic) == (server, row.traffic):
                share = row.requests_per_second.median / baseline_row.requests_per_second.median
                return f"{share:.0%}"
        return ""

    @property
    def peft_requests(self) -> str:
        """How many requests of each run the PEFT baseline got: `the first 64 to 128 of 256
        requests`; empty where it got all, or was not measured.
        """
        peft = [row.requests for row in self.rows if row.server == PEFT]
        engine_requests = [row.requests for row in self.rows if row.server != PEFT]
        if not peft or not engine_requests or min(peft) == min(engine_requests):
            return ""
        counts = f"{min(peft)} to {max(peft)}"
        if min(peft) == max(peft):
            counts = str(min(peft))
        return f"the first {counts} of {max(engine_requests)} requests"


def table(report: FleetReport) -> str:
    """The report as text: a line for every server under every traffic."""
    head = (
        f"{'adapters':>8} {'':<5} {'Zipf':>5} {'used':>5} | {'server':<13} "
        f"{'requests/s (min to max)':>26} {'p50 ms':>8} {'p95 ms':>8} {'p99 ms':>8} {'tokens':>7} "
        f"{'passes':>6} {'loads':>6} {'MiB':>6} {'swap-ins':>8} {'MiB':>7} "
        f"{'of all resident':>15} {'of base':>8}"
    )
    lines = [head, "-" * len(head)]
    lines += [_line(report, row) for row in report.rows]
    peft = f"PEFT baseline: a {CAPACITY}-adapter LRU"
    if report.peft_requests:
        peft += f", only {report.peft_requests} of a run"
    lines += notes(
        f"{peft}. used: adapters that got a request.",
        "passes: batches that the model computed. loads: adapters read from disk. swap-ins:",
        "adapters copied into a slot (engine) or a place (PEFT). of all resident: % of",
        "all-resident throughput, with a slot for every adapter.",
    )
    return "\n".join([*lines, caption(report)])


def _line(report: FleetReport, row: FleetRow) -> str:
    alpha = ""
    if row.alpha is not None:
        alpha = f"{row.alpha:.1f}"
    return (
        f"{row.adapters:>8} {METHODS[row.method].label:<5} {alpha:>5} {row.working_set:>5} | "
        f"{row.server:<13} {row.requests_per_second.text(1):>26} "
        f"{row.p50_ms:>8.0f} {row.p95_ms:>8.0f} {row.p99_ms:>8.0f} {row.computed_tokens:>7} "
        f"{row.forward_passes or '':>6} {row.adapter_loads:>6} {row.loaded_mib:>6.0f} "
        f"{row.swap_ins:>8} "
        f"{row.swapped_in_mib:>7.0f} {report.throughput_share(row, ALL_RESIDENT):>15} "
        f"{report.throughput_share(row, BARE_BASE):>8}"
    )


def caption(report: FleetReport) -> str:
    """Where the numbers come from, in one line."""
    sizes = dict.fromkeys(f"{row.adapter_mib:.1f}" for row in report.rows)
    peft = f"PEFT baseline: {CAPACITY}-adapter LRU"
    if report.peft_requests:
        peft += f", only {report.peft_requests}"
    return (
        f"{source(report)}; {report.workers} workers, conversations of "
        f"{report.conversation_tokens} tokens, random adapters of {' and '.join(sizes)} MiB; "
        f"{peft}; median of {report.repeats} repeats."
    )


def draw(report: FleetReport, path: Path) -> None:
    """Write the plot: requests per second of every server, against the number of adapters or Zipf's
    alpha.
    """
    methods = list(dict.fromkeys(row.method for row in report.rows))
    figure = new_figure(2 + 6 * len(methods), 5.2)
    panels = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    for axes, method in zip(panels, methods, strict=True):
        _draw_panel(axes, [row for row in report.rows if row.method == method])
        axes.set_title(METHODS[method].label)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("requests per second")
    panels[0].legend(frameon=False)
    save_figure(figure, caption(report), path, columns=140)


def _draw_panel(axes: Axes, method_rows: Sequence[FleetRow]) -> None:
    for server, (colour, marker) in SERVERS.items():
        rows = [row for row in method_rows if row.server == server]
        if rows:
            spreads = [row.requests_per_second for row in rows]
            x = [_x(row) for row in rows]
            plot_spreads(axes, x, spreads, color=colour, marker=marker, label=server)
    axes.grid(linewidth=0.4, alpha=0.6)
    if method_rows[0].alpha is not None:
        axes.set_xlabel("alpha of Zipf's law: the larger, the fewer adapters get most requests")
        return
    axes.set_xscale("log", base=2)
    # The number beside 32 has no label.
    axes.set_xticks(sorted({row.adapters for row in method_rows} - {SLOTS + 1}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("adapters, round-robin")


def _x(row: FleetRow) -> float:
    if row.alpha is None:
        return row.adapters
    return row.alpha
