"""The operator benchmark measures every way to multiply, and prints what others can read."""

from __future__ import annotations

import json

import pytest
import torch

from serve import sgmv_bench


def test_every_way_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = sgmv_bench.measure(torch.float32, 16, 24, segments=3, length=2, rank=4, repeats=1)
    assert (cell.dtype, cell.segments, cell.tokens, cell.rank) == ("float32", 3, 6, 4)
    assert all(ms is not None and ms >= 0 for ms in (cell.base_ms, cell.stock_ms, cell.runs_ms, cell.views_ms))
    monkeypatch.setattr(sgmv_bench, "STOCK_LIMIT", 0)
    assert sgmv_bench.measure(torch.float32, 16, 24, segments=3, length=2, rank=4, repeats=1).stock_ms is None


def test_the_command_prints_every_cell_with_versions_and_hardware(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sgmv_bench, "SHAPES", [(16, 24)])
    monkeypatch.setattr(sgmv_bench, "BATCHES", [(2, 3)])
    monkeypatch.setattr("sys.argv", ["sgmv_bench", "--repeats", "1"])
    threads = torch.get_num_threads()
    sgmv_bench.main()
    torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    assert len(found["cells"]) == 4  # two types, two ranks
    assert {"torch", "vllm"} <= found["versions"].keys() and found["hardware"]["cpu"]
