from __future__ import annotations

from eval.markdown import (
    accuracy_cell,
    markdown_table,
    metric_cells,
    metric_labels,
    percent_cell,
    share_cell,
)
from eval.quality import METRICS


def test_a_table_is_aligned_in_its_source() -> None:
    assert markdown_table(["rule", "n"], [["a", "100"], ["longer", ""]]).splitlines() == [
        "| rule   | n   |",
        "| ------ | --- |",
        "| a      | 100 |",
        "| longer |     |",
    ]


def test_cells_say_what_is_not_there() -> None:
    assert accuracy_cell(0.5, (0.25, 0.75), 0.1) == "50.0 ± 10.0 [25.0, 75.0]"
    assert accuracy_cell(0.5, None) == "50.0"
    assert (percent_cell(None), percent_cell(0.5), percent_cell(0.5, (0.0, 1.0))) == (
        "",
        "50.0",
        "50.0 [0.0, 100.0]",
    )
    assert (share_cell(1, 4), share_cell(0, 0)) == ("25.0", "-")


def test_every_metric_of_a_table_has_its_column() -> None:
    assert len(metric_labels("quality")) + len(metric_labels("threshold")) == len(METRICS)
    cells = metric_cells({"f1": 0.5, "auroc": None})
    assert cells[:3] == ["0.500", "-", ""]
    assert len(cells) == len(metric_labels("quality"))
