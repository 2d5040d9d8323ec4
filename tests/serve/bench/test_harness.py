"""The harness: cells in turns, spreads and ratios."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest import CaptureFixture

from guard.errors import GuardError
from serve.bench.harness import Repeat
from tests.serve.bench.toy_bench import ToyCell, reported, toy_bench


def test_compared_cells_take_turns(tmp_path: Path) -> None:
    bench, seeds = toy_bench(tmp_path, "--repeats", "3"), []
    bench.on_measure = lambda cell, repeat: seeds.append((cell.size, repeat))
    bench.main()
    assert bench.log == [
        [1, 1, 2, 2, 10, 10],
        *[(1, "slow", 0), (1, "fast", 0), (1, "fast", 1), (1, "fast", 2)],
        *[(2, "slow", 0), (2, "fast", 0), (2, "fast", 1), (2, "fast", 2)],
        *[(10, "slow", 0), (10, "fast", 0), (10, "fast", 1), (10, "fast", 2)],
    ]
    by_block = {(size, repeat.number): repeat.seed for size, repeat in seeds}
    assert all(by_block[size, repeat.number] == repeat.seed for size, repeat in seeds)
    assert len(set(by_block.values())) == len(by_block) == 9
    assert {repeat.of for _, repeat in seeds} == {3}
    bench = toy_bench(tmp_path)
    bench.cells = lambda: [  # type: ignore[method-assign]
        ToyCell(size=1, server=server, repeats=3) for server in ("slow", "fast", "third")
    ]
    bench.main()
    firsts = [bench.log[1 + 3 * number][1] for number in range(3)]
    assert firsts == ["slow", "fast", "third"]  # another one in each repeat


def test_rows_have_spreads_over_the_repeats_and_ratios_within_them_and_are_published(
    tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    toy_bench(tmp_path / "new").main()
    rows = reported(tmp_path / "new" / "toy_bench.json").rows
    slow, fast = (row for row in rows if row.cell["size"] == 2)
    assert (slow.repeats, fast.repeats) == (1, 2)
    wall_ms = fast.measured["wall_ms"]
    assert (wall_ms.median, wall_ms.min, wall_ms.max) == (2.5, 2.0, 3.0)
    assert fast.measured["request_ms"].p95 == 3.0 and wall_ms.p95 is None  # of 40 and of 2
    assert slow.measured["over_fast"].median == 3.0 and "over_fast" not in fast.measured
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["toy_bench.json"]
    printed = capsys.readouterr().out
    assert "2.5 (2.0 to 3.0)" in printed and "3.0x" in printed
    assert "A note." in printed and "peak memory" in printed


def test_an_error_ends_it_and_what_was_measured_before_stays(tmp_path: Path) -> None:
    def fail(cell: ToyCell, repeat: Repeat) -> None:
        raise GuardError("the engine has ended")

    toy_bench(tmp_path).main()
    bench = toy_bench(tmp_path)
    bench.on_measure = fail
    with pytest.raises(GuardError, match="the engine has ended"):
        bench.main()
    assert reported(tmp_path / "toy_bench.json").rows
