"""The live view: grids in a terminal, a few plain lines without one."""

from __future__ import annotations

import io

from rich.console import Console

from serve.bench.race.live import LaneView, RaceView


def console(*, is_terminal: bool) -> Console:
    terminal = {"TERM": "xterm-256color"}
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120, _environ=terminal)


def race(view_console: Console) -> str:
    """Eight rules, a verdict each step."""
    with RaceView(["lora", "alora"], 8, view_console) as view:
        for number in range(8):
            verdicts = [True] * number + [None] * (8 - number)
            view._shown_at = 0.0  # as if time had passed
            view.update("lora", verdicts, 0.5 * number)
        view.finish("lora", [True] * 8, 4.0)
        view.finish("alora", [False] * 8, 0.25)
    output = view_console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_without_a_terminal_there_are_a_few_plain_lines() -> None:
    lines = race(console(is_terminal=False)).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["LoRA", "2"],
        ["LoRA", "4"],
        ["LoRA", "6"],
        ["LoRA", "8"],
        ["aLoRA", "8"],
    ]
    assert lines[-1].endswith("8 of 8 verdicts, 0.25 s") and "\x1b" not in "".join(lines)


def test_in_a_terminal_both_grids_are_redrawn() -> None:
    output = race(console(is_terminal=True))
    assert "LoRA" in output and "aLoRA" in output and "\x1b[" in output
    assert "8 of 8 verdicts, 4.0 s" in output


def test_views_are_redrawn_now_and_then_only() -> None:
    quiet = console(is_terminal=False)
    view = RaceView(["lora"], 4, quiet)
    view.update("lora", [True, None, None, None], 0.1)
    view.update("lora", [True, True, None, None], 0.2)  # at once after the first
    output = quiet.file
    assert isinstance(output, io.StringIO)
    assert len(output.getvalue().splitlines()) == 1 and view.lanes["lora"].done == 2


def test_a_lane_counts_its_verdicts() -> None:
    lane = LaneView("LoRA", [True, None, False], elapsed_s=1.0)
    assert lane.done == 2 and lane.line() == "LoRA      2 of 3 verdicts, 1.0 s"
