"""The latency report's file and table."""

from __future__ import annotations

import json
from pathlib import Path

from serve.bench.latency.grid import Cell
from serve.bench.latency.report import LatencyReport, table
from tests.serve.bench.latency.toy_report import COST, toy_report


def test_the_report_comes_back_from_its_file(tmp_path: Path) -> None:
    report = toy_report()
    report.save(tmp_path / "latency.json")
    assert LatencyReport.load(tmp_path / "latency.json") == report


def test_the_file_has_the_fields_that_others_read(tmp_path: Path) -> None:
    toy_report().save(tmp_path / "latency.json")
    content = json.loads((tmp_path / "latency.json").read_text())
    assert {"commit", "hardware", "versions", "model", "cells"} <= content.keys()
    cell = content["cells"][0]
    fields = "prompt_tokens suffix_tokens rules mode wall_ms mean_ms p50_ms p95_ms p99_ms"
    assert set(fields.split()) | {"cached_tokens", "computed_tokens", "repeats"} <= cell.keys()
    assert cell["wall_ms"].keys() == {"median", "min", "max", "p95"}


def line_of(text: str, tokens: int, rules: int) -> str:
    start = [str(tokens), str(rules)]
    return next(line for line in text.splitlines() if line.split()[:2] == start)


def test_the_table_has_a_line_for_every_cell_and_says_where_it_comes_from() -> None:
    text = table(toy_report(left_out=("5000 tokens x 100 rules",)))
    line = line_of(text, 1000, 100)
    assert "100000" in line and "20.8x" in line and "1.20x" in line  # 100,000 / (1.2 * 4,000)
    assert "*" not in line
    assert "*" in line_of(text, 5000, 100)  # longer than the context
    cost = "marginal cost per rule on 1,000 tokens, from 1 to 5 rules: 36.00 ms (30.00 to 40.00)"
    assert cost in text
    assert "left out: 5000 tokens x 100 rules" in text
    assert "while the clock ran: 2; peak memory of the process: 2,346 MiB" in text
    assert "two cores" in text and "abc1234" in text
    assert "RANDOM WEIGHTS" not in text and "RANDOM WEIGHTS" in table(toy_report("random weights"))


def test_the_table_has_a_column_of_p95_only_where_enough_repeats_have_one() -> None:
    few = table(toy_report())
    assert few.splitlines()[0].split().count("p95") == 0 and "p95:" not in few
    enough = toy_report(grid=(Cell(1000, 5, 20), Cell(1000, 20, 2)))
    text = table(enough)
    head, _, *lines = text.splitlines()
    assert head.split().count("p95") == 1 and "where there are 20 or more" in " ".join(text.split())
    walls = [line.split("│")[1] for line in lines[:2]]  # 1.2 ms a token of all suffixes
    assert walls[0].split()[-1] == "1380" and walls[1].split()[-1] == "1920)"


def test_a_cost_of_few_pairs_is_printed_with_their_number_and_no_interval() -> None:
    report = toy_report()
    for pairs, words in ((1, "1 pair of repeats"), (4, "4 pairs of repeats")):
        few = COST.model_copy(update={"ms_low": None, "ms_high": None, "pairs": pairs})
        text = table(report.model_copy(update={"marginal_costs": (few,)}))
        assert f"5 rules: 36.00 ms ({words}: too few for an interval)\n" in text


def test_the_table_says_that_the_base_reads_more_of_a_rule_where_it_does() -> None:
    assert "A rule's own suffix has 30 tokens. What" in table(toy_report())
    text = " ".join(table(toy_report(base_suffix_tokens=47)).split())
    assert "suffix has 30 tokens. The bare base's, which carries the rule's title, has 47." in text


def test_the_order_of_the_recipe_s_methods_does_not_change_what_the_columns_say() -> None:
    report = toy_report()
    cells = sorted(report.cells, key=lambda row: ["base", "alora", "lora"].index(row.mode))
    turned = report.model_copy(update={"cells": tuple(cells)})
    assert turned.modes == ["base", "alora", "lora"]
    assert table(turned) == table(report)


def test_a_report_of_one_method_has_a_table() -> None:
    report = toy_report()
    cells = tuple(row for row in report.cells if row.mode != "alora")
    missing = dict.fromkeys(
        ("lora_over_alora", "alora_over_lower_bound", "alora_engine_over_lower_bound")
    )
    ratios = tuple(ratio.model_copy(update=missing) for ratio in report.ratios)
    text = table(report.model_copy(update={"cells": cells, "ratios": ratios}))
    assert "LoRA wall" in text and "1.20x" not in text
