"""The ablation's table and plot, on the kept measurement."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from guard.layout import ROOT
from serve.bench.ablation.ablations import ABLATIONS, FULL_ENGINE
from serve.bench.ablation.report import AblationReport, draw, table


def kept() -> AblationReport:
    (path,) = (ROOT / "docs" / "benchmarks").rglob("ablation_tiny_2cores.json")
    return AblationReport.load(path)


def test_the_table_states_every_engine_as_times_of_the_full_one() -> None:
    lines = table(kept()).splitlines()
    full = [line for line in lines if line.startswith(f"{FULL_ENGINE} ") and "|" in line]
    assert len(full) == 3 and all(line.endswith("1.00x") for line in full)


def test_the_kept_ablations_are_those_of_the_table() -> None:
    for traffic, ablations in zip(kept().traffics, ABLATIONS.values(), strict=True):
        assert [row.ablation for row in traffic.rows] == [ablation.name for ablation in ablations]


def test_the_plot_has_a_panel_for_each_traffic(tmp_path: Path) -> None:
    draw(kept(), tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size[0] == 1200 and image.size[1] > 1000
