"""What a base in 8 bits costs and saves, by made-up logits and by real engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from guard.conversation.example import Example, Message, write_examples
from guard.machine.device import INT8_FLAGS, cpu_info
from guard.verdict import Verdict
from guard.weights.card import read_card
from serve.bench.harness import Repeat
from serve.bench.quantized import QuantizedCell
from serve.bench.report import GridReport
from serve.engine import Check
from tests.serve.bench.toy_bench import bench_on
from tests.serve.guarded import save_adapter

FLAGS = set(cpu_info("flags").split())
ROWS = 12


@pytest.fixture
def runs(own_cache: Path) -> Path:
    """Those of a rule with a random aLoRA."""
    folder = own_cache.parent
    save_adapter(folder / "tiny/refund/alora", "refund", seed=1)
    for split in ("validation", "test"):
        said = [(Message("user", f"{split} {row}"),) for row in range(ROWS)]
        rows = [Example(f"{n}", "refund", it, n % 2, "test", "x", "") for n, it in enumerate(said)]
        write_examples(folder / f"data/refund/{split}.jsonl", rows)
    return folder


def test_verdicts_are_by_thresholds_of_each_base(runs: Path, monkeypatch: MonkeyPatch) -> None:
    """Logits are about 0 and about 9, and a few test rows are judged wrongly."""
    monkeypatch.setattr("guard.recipe.cpu_info", lambda _: "avx_vnni")
    middles, wrong = {"whole": 0, "int8": 9}, {"whole": ["test 3"], "int8": ["test 4", "test 6"]}

    def checks(cell: QuantizedCell, rows: Sequence[Example]) -> list[Check]:
        wrongly = [row.messages[0].content in wrong[cell.base] for row in rows]
        signs = [6 * (row.label ^ it) - 3 for row, it in zip(rows, wrongly, strict=True)]
        verdicts = [Verdict("refund", middles[cell.base] + it, 0.5, 0.5) for it in signs]
        return [Check((verdict,), {}, 0, 0, 1.0) for verdict in verdicts]

    bench = bench_on("quantized", runs)
    monkeypatch.setattr(bench, "_checks", checks)
    samples = [bench.measure(cell, Repeat(0, 1, 0)) for cell in bench.cells()]
    assert [sample["accuracy"] for sample in samples] == [11 / ROWS, 10 / ROWS]
    assert [sample["flips"] for sample in samples] == [0, 3]
    assert samples[1]["weights_mib"] < 0.6 * samples[0]["weights_mib"]


@pytest.mark.slow
@pytest.mark.skipif(not FLAGS & INT8_FLAGS or "amx_int8" in FLAGS, reason="no int8 of float32")
def test_real_engines_judge_all_rows_and_the_weights_stay(runs: Path) -> None:
    card = read_card(runs / "tiny/refund/alora")
    bench_on("quantized", runs, "--repeats", "2").main()
    rows = GridReport.model_validate_json((runs / "quantized_bench.json").read_text()).rows
    assert [(row.cell["base"], row.repeats) for row in rows] == [("whole", 2), ("int8", 2)]
    assert all(row.median("rows") == ROWS and row.median("wall_ms") > 0 for row in rows)
    assert read_card(runs / "tiny/refund/alora") == card
