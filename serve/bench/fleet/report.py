"""The fleet benchmarks' numbers: the JSON file, the table in the terminal, the plot. Knows nothing of engines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from guard.files.yaml_file import Strict
from serve.bench.report import BenchReport

SLOTS = 32
CAPACITY = (
    25  # adapters that plain PEFT keeps in memory: the size that Pioneer's comparison gives its LRU
)
NAMES: dict[str, str] = {"lora": "LoRA", "alora": "aLoRA"}
SERVERS = ("PEFT", "one slot", f"{CAPACITY} slots", f"{SLOTS} slots", "all slots", "base")
COLOURS = (
    "#0072B2",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#E69F00",
    "#009E73",
)  # Okabe and Ito's palette


class FleetRow(Strict):
    """One server under one cell's traffic: medians over the repeats; latencies are of the requests of all repeats, in ms."""

    server: str
    method: str
    adapters: int
    alpha: float | None
    requests: int
    working_set: int  # adapters that were asked at all, in the median repeat
    per_second: float
    per_second_min: float
    per_second_max: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    read: int  # adapters, from disk
    brought: int  # adapters, into a slot (engine) or a place (PEFT)
    adapter_mib: float
    read_mib: float
    brought_mib: float
    computed_tokens: int


class FleetReport(BenchReport):
    """Everything in `runs/adapters_bench.json` or `runs/fleet_bench.json`."""

    workers: int
    conversation_tokens: int
    repeats: int
    engine: dict[str, str]
    rows: tuple[FleetRow, ...]


def table(report: FleetReport) -> str:
    """The report as text: a line for every server under every traffic."""
    head = f"{'adapters':>8} {'':<5} {'Zipf':>5} {'asked':>6} | {'server':<10} {'requests/s (min to max)':>26} "
    head += f"{'p50 ms':>8} {'p95 ms':>8} {'p99 ms':>8} {'tokens':>7} "
    head += f"{'read':>6} {'MiB':>6} {'brought':>8} {'MiB':>7} {'of all slots':>12} {'of base':>8}"
    lines = [head, "-" * len(head)]
    for row in report.rows:
        rate = f"{row.per_second:.1f} ({row.per_second_min:.1f} to {row.per_second_max:.1f})"
        alpha = "" if row.alpha is None else f"{row.alpha:.1f}"
        traffic = (row.method, row.adapters, row.alpha)
        alike = {
            each.server: each.per_second
            for each in report.rows
            if (each.method, each.adapters, each.alpha) == traffic
        }
        of_resident, of_base = (
            f"{row.per_second / alike[name]:.0%}" if name in alike else ""
            for name in ("all slots", "base")
        )
        lines.append(
            f"{row.adapters:>8} {NAMES[row.method]:<5} {alpha:>5} {row.working_set:>6} | {row.server:<10} {rate:>26} "
            f"{row.p50_ms:>8.0f} {row.p95_ms:>8.0f} {row.p99_ms:>8.0f} {row.computed_tokens:>7} "
            f"{row.read:>6} {row.read_mib:>6.0f} {row.brought:>8} {row.brought_mib:>7.0f} "
            f"{of_resident:>12} {of_base:>8}"
        )
    lines.append(
        "asked: adapters that were asked at all. read: from disk. brought: into a slot (engine) or a place (PEFT)."
    )
    lines.append(caption(report))
    return "\n".join(lines)


def caption(report: FleetReport) -> str:
    """Where the numbers come from, in one line."""
    sizes = " and ".join(
        f"{mib:.1f}" for mib in dict.fromkeys(row.adapter_mib for row in report.rows)
    )
    return (
        f"{report.model} on {report.hardware}; commit {report.commit}; {report.workers} workers, conversations of "
        f"{report.conversation_tokens} tokens, random adapters of {sizes} MiB; median of {report.repeats} repeats."
    )


def draw(report: FleetReport, path: Path) -> None:
    """Write the plot: requests per second of every server, against the number of adapters or Zipf's alpha."""
    methods = list(dict.fromkeys(row.method for row in report.rows))
    figure = Figure(figsize=(2 + 6 * len(methods), 5.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    for axes, method in zip(panels, methods, strict=True):
        _panel(axes, [row for row in report.rows if row.method == method])
        axes.set_title(NAMES[method])
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("requests per second")
    panels[0].legend(frameon=False)
    figure.supxlabel("\n".join(textwrap.wrap(caption(report), 140)), fontsize=7, color="#444444")
    figure.savefig(path)


def _panel(axes: Axes, of_method: Sequence[FleetRow]) -> None:
    by_alpha = of_method[0].alpha is not None
    for colour, marker, server in zip(COLOURS, "osPD^v", SERVERS, strict=True):
        rows = [row for row in of_method if row.server == server]
        if rows:
            x = [row.adapters if row.alpha is None else row.alpha for row in rows]
            axes.fill_between(
                x,
                [row.per_second_min for row in rows],
                [row.per_second_max for row in rows],
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
            axes.plot(
                x, [row.per_second for row in rows], color=colour, marker=marker, label=server
            )
    if not by_alpha:
        axes.set_xscale("log", base=2)
        axes.set_xticks([row.adapters for row in of_method if row.server == of_method[0].server])
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(
        "alpha of Zipf's law: the larger, the fewer adapters are asked"
        if by_alpha
        else "adapters, asked in turn"
    )
    axes.grid(linewidth=0.4, alpha=0.6)
