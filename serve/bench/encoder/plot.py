"""The encoder benchmark's plot. Knows nothing of engines."""

from __future__ import annotations

from pathlib import Path

from guard.method import METHODS
from serve.bench.encoder.report import EncoderReport, caption
from serve.bench.plot import METHOD_COLOURS, METHOD_MARKERS, new_figure, plot_spreads, save_figure

LINES = {True: "-", False: "--"}  # by whether it is the encoder, or the decoder beside it


def draw(report: EncoderReport, path: Path) -> None:
    """Write the plot: time to all verdicts against the number of rules, a panel for each length."""
    sizes = sorted({cell.tokens for cell in report.cells})
    lines = dict.fromkeys((cell.model, cell.method) for cell in report.cells)
    figure = new_figure(1 + 4.5 * len(sizes), 5)
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axes, tokens in zip(panels, sizes, strict=True):
        for model, method in lines:
            cells = report.line(model, method, tokens)
            plot_spreads(
                axes,
                [cell.rules for cell in cells],
                [cell.wall_ms for cell in cells],
                color=METHOD_COLOURS[method],
                marker=METHOD_MARKERS[method],
                linestyle=LINES[model == report.model],
                label=f"{METHODS[method].label} on {model}",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.set_xlabel("rules on one conversation")
        axes.set_title(f"{tokens:,} tokens")
    panels[0].set_ylabel("ms to all verdicts")
    panels[0].legend(frameon=False)
    save_figure(figure, caption(report), path, columns=140)
