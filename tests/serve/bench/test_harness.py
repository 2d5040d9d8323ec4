"""The harness: cells in turns, spreads and ratios, and what is measured again or goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.bench import harness
from serve.bench.harness import Repeat
from serve.bench.report import GridReport
from serve.engine import CODE
from tests.serve.bench.toy_bench import ToyBench, ToyCell, toy_bench


def test_compared_cells_are_measured_in_turns_and_groups_one_after_the_other(
    tmp_path: Path,
) -> None:
    bench, seeds = toy_bench(tmp_path, "--repeats", "3"), []
    bench.on_measure = lambda cell, repeat: seeds.append((cell.size, repeat))
    bench.main()
    assert bench.log == [
        [1, 1, 2, 2],
        *[(1, "slow", 0), (1, "fast", 0), (1, "fast", 1), (1, "fast", 2)],
        *[(2, "slow", 0), (2, "fast", 0), (2, "fast", 1), (2, "fast", 2)],
        [10, 10],
        *[(10, "fast", number) for number in range(3)],
    ]
    by_block = {(size, repeat.number): repeat.seed for size, repeat in seeds}
    assert all(by_block[size, repeat.number] == repeat.seed for size, repeat in seeds)
    assert len(set(by_block.values())) == len(by_block) == 9
    assert {repeat.of for _, repeat in seeds} == {3}


def test_another_cell_is_first_in_each_repeat(tmp_path: Path) -> None:
    bench = toy_bench(tmp_path)
    bench.cells = lambda: [  # type: ignore[method-assign]
        ToyCell(size=1, server=server, repeats=3) for server in ("slow", "fast", "third")
    ]
    bench.main()
    firsts = [bench.log[1 + 3 * number][1] for number in range(3)]
    assert firsts == ["slow", "fast", "third"]


def test_a_row_has_spreads_over_the_repeats_and_ratios_within_them(tmp_path: Path) -> None:
    toy_bench(tmp_path).main()
    report = GridReport.load(tmp_path / "toy_bench.json")
    (slow,), (fast,) = report.find(size=2, server="slow"), report.find(size=2, server="fast")
    assert (slow.repeats, fast.repeats) == (1, 2)
    wall_ms = fast.measured["wall_ms"]
    assert (wall_ms.median, wall_ms.min, wall_ms.max) == (2.5, 2.0, 3.0)
    assert fast.measured["request_ms"].p95 == 3.0 and wall_ms.p95 is None  # of 40 and of 2
    assert slow.measured["over_fast"].median == 3.0 and "over_fast" not in fast.measured
    (left_out,) = report.left_out
    assert left_out.cell == {"size": 10, "server": "slow"} and not report.find(**left_out.cell)
    assert report.facts == {"adapters": "none"} and not report.is_resumed


def test_report_plot_and_table_are_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy_bench(tmp_path / "new").main()
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["toy_bench.json", "toy_bench.png"]
    assert (tmp_path / "new" / "toy_bench.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for text in ("2.5 (2.0 to 3.0)", "3.0x", "left out: size 10, server slow: it is too slow"):
        assert text in printed
    assert "A note." in printed and "peak memory" in printed and "adapters none" in printed


def test_what_has_not_changed_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ToyBench, "panels", lambda *_: [])  # a plot takes longest

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


def test_a_report_depends_on_all_code_that_measures_and_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, ...]] = []
    monkeypatch.setattr(harness, "running_code", lambda files: asked.append(files) or "code")
    toy_bench(tmp_path).main()
    files = set(asked[0])
    assert set(CODE) < files and Path(__file__).with_name("toy_bench.py") in files
    own = {"harness.py", "report.py", "latency.py", "prompts.py", "adapters.py"}
    assert own <= {file.name for file in files}


def interrupt_at(size: int, error: BaseException) -> object:
    def on_measure(cell: ToyCell, repeat: Repeat) -> None:
        if cell.size == size and repeat.number == 1:
            raise error

    return on_measure


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = toy_bench(tmp_path)
    bench.on_measure = interrupt_at(10, KeyboardInterrupt())  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    (part,) = tmp_path.glob("toy_bench.*.part.jsonl")
    part.write_text(part.read_text() + '\n["{\\"si')  # killed while it was written
    bench = toy_bench(tmp_path)
    bench.main()
    assert bench.log == [[10, 10], (10, "fast", 1)]  # the first group needs no server
    report = GridReport.load(tmp_path / "toy_bench.json")
    assert report.is_resumed and len(report.rows) == 5 and not part.exists()
    assert "of several runs, as one was interrupted" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["--force"], ["--repeats", "3"]])
def test_a_run_of_other_inputs_or_by_force_begins_anew(tmp_path: Path, words: list[str]) -> None:
    bench = toy_bench(tmp_path)
    bench.on_measure = interrupt_at(10, KeyboardInterrupt())  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    bench = toy_bench(tmp_path, *words)
    bench.main()
    assert (1, "slow", 0) in bench.log
    assert not GridReport.load(tmp_path / "toy_bench.json").is_resumed
    if not bench.options.force:  # what was interrupted is still there
        bench = toy_bench(tmp_path)
        bench.main()
        assert bench.log == [[10, 10], (10, "fast", 1)]


def test_a_benchmark_that_cannot_be_resumed_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.serve.bench.toy_bench.ToyBench.is_resumable", False)
    bench = toy_bench(tmp_path)
    bench.on_measure = interrupt_at(10, KeyboardInterrupt())  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        bench.main()
    bench = toy_bench(tmp_path)
    bench.main()
    assert (1, "slow", 0) in bench.log


def test_what_was_measured_before_an_error_is_reported_and_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = toy_bench(tmp_path)
    bench.on_measure = interrupt_at(2, GuardError("the server has ended"))  # type: ignore[assignment]
    with pytest.raises(GuardError, match=r"ended early \(got the server has ended\)"):
        bench.main()
    report = GridReport.load(tmp_path / "toy_bench.json")
    assert report.ended_by == "the server has ended" and len(report.rows) == 4
    assert "ENDED EARLY: the server has ended" in capsys.readouterr().out
    bench = toy_bench(tmp_path)
    bench.main()
    assert bench.log[0] == [1, 1, 2, 2] and (1, "slow", 0) not in bench.log
    assert GridReport.load(tmp_path / "toy_bench.json").ended_by is None


def test_an_error_before_the_first_sample_leaves_no_report(tmp_path: Path) -> None:
    bench = toy_bench(tmp_path)

    def fail(*_: object) -> None:
        raise GuardError("no engine")

    bench.on_measure = fail
    with pytest.raises(GuardError, match="no engine"):
        bench.main()
    assert not (tmp_path / "toy_bench.json").exists()


def test_the_peak_memory_is_that_of_servers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "peak_of_processes_mib", lambda: 1e6)
    toy_bench(tmp_path).main()
    assert GridReport.load(tmp_path / "toy_bench.json").peak_memory_mib == 1e6
