"""The harness: cells in turns, spreads and ratios, and what is measured again."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.errors import GuardError
from serve.bench import harness
from serve.bench.harness import Repeat
from serve.bench.report import GridReport
from serve.engine import CODE
from tests.serve.bench.toy_bench import ToyCell, toy_bench


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
    bench = toy_bench(tmp_path, "--force")
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
    report = GridReport.load(tmp_path / "new" / "toy_bench.json")
    (slow,), (fast,) = report.find(size=2, server="slow"), report.find(size=2, server="fast")
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


def test_what_has_not_changed_is_not_measured_again(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    def measures(*words: str, weights: str = "first") -> bool:
        bench = toy_bench(tmp_path, *words, weights=weights)
        bench.main()
        assert ("nothing changed" in capsys.readouterr().out) == (not bench.log)
        return bool(bench.log)

    assert measures() and not measures() and measures("--force")
    assert measures("--repeats", "3") and measures()
    assert measures("--quick") and not measures(), "a coarse run replaced the full report"
    assert measures(weights="second") and measures()
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "7")
        assert measures()
    assert measures()
    for name, value in (("versions", {"vllm": "9.9"}), ("hardware", "another")):
        with monkeypatch.context() as patch:
            patch.setattr(harness, name, lambda value=value: value)
            assert measures()
    assert measures()
    (tmp_path / "toy_bench.json").write_text('{"model": "tiny"}')
    assert measures() and not measures()


def test_a_report_depends_on_all_code(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    asked: list[tuple[Path, ...]] = []
    monkeypatch.setattr(harness, "running_code", lambda files: asked.append(files) or "code")
    toy_bench(tmp_path).main()
    files = set(asked[0])
    assert set(CODE) < files and Path(__file__).with_name("toy_bench.py") in files
    own = {"harness.py", "report.py", "latency.py", "prompts.py", "adapters.py"}
    assert own <= {file.name for file in files}


def test_an_error_ends_it_and_what_was_measured_before_stays(tmp_path: Path) -> None:
    def fail(cell: ToyCell, repeat: Repeat) -> None:
        raise GuardError("the engine has ended")

    toy_bench(tmp_path).main()
    bench = toy_bench(tmp_path, "--force")
    bench.on_measure = fail
    with pytest.raises(GuardError, match="the engine has ended"):
        bench.main()
    assert GridReport.load(tmp_path / "toy_bench.json").rows
