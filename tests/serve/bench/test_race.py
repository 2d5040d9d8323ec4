"""A race on a real engine, with few rules, and its picture of the measured times."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from pytest import CaptureFixture

from serve.bench.race import HOLD_S, LONGEST_S, Lane, RacePicture, RaceReport
from tests.serve.bench.toy_bench import bench_on

RULES = 100


def toy_race(lora_s: float = 12.0, alora_s: float = 0.2) -> RaceReport:
    """LoRA's verdicts come two at a time, aLoRA's all at once."""
    pairs = RULES // 2
    steps = tuple(lora_s * (1 + number // 2) / pairs for number in range(RULES))
    return RaceReport(
        commit="abc1234",
        hardware="two cores",
        versions={"vllm": "0.32.0"},
        model="tiny",
        peak_memory_mib=1.0,
        conversation_tokens=1000,
        rules=RULES,
        engine={},
        lanes=(
            Lane(method="lora", verdict_s=steps, computed_tokens=100_000),
            Lane(method="alora", verdict_s=(alora_s,) * RULES, computed_tokens=1300),
        ),
    )


SVG = "{http://www.w3.org/2000/svg}"


def drawn(report: RaceReport) -> ElementTree.Element:
    return ElementTree.fromstring(RacePicture(report).svg())


def words(picture: ElementTree.Element) -> str:
    return " ".join(text.text or "" for text in picture.iter(f"{SVG}text"))


def cells_by_time(picture: ElementTree.Element, cycle_s: float) -> dict[float, int]:
    """How many cells fill at each moment, in seconds of the picture."""
    cells: dict[float, int] = {}
    for path in picture.iter(f"{SVG}path"):
        animation = path.find(f"{SVG}animate")
        if animation is not None:
            moment = round(cycle_s * float(animation.attrib["keyTimes"].split(";")[1]), 2)
            cells[moment] = cells.get(moment, 0) + path.attrib["d"].count("M")
    return cells


def test_cells_fill_at_the_measured_times() -> None:
    report = toy_race(lora_s=12.0, alora_s=0.2)
    cells = cells_by_time(drawn(report), cycle_s=12.0 + HOLD_S)
    assert sum(cells.values()) == 2 * RULES
    assert cells[0.2] == RULES  # aLoRA's, all at once
    assert cells[0.24] == 2 and cells[12.0] == 2 and len(cells) == 51
    assert "Shown in real time." in words(drawn(report))
    report = toy_race(lora_s=60.0, alora_s=0.8)  # a long race is shown faster, and says so
    cells = cells_by_time(drawn(report), cycle_s=LONGEST_S + HOLD_S)
    assert max(cells) == pytest.approx(LONGEST_S, abs=0.01) and cells[0.2] == RULES
    assert "Shown 4.0 times as fast as measured." in words(drawn(report))


def test_the_picture_stands_alone_is_small_and_shows_the_end_without_animation() -> None:
    svg = RacePicture(toy_race(lora_s=300.0, alora_s=3.0)).svg()
    assert len(svg.encode()) < 100_000
    assert "href" not in svg and "<script" not in svg and "url(" not in svg
    assert "prefers-color-scheme:dark" in svg
    shown = words(drawn(toy_race()))
    for text in ("12.0 s", "0.20 s", "aLoRA is 60x as fast", "two cores", "abc1234"):
        assert text in shown


@pytest.mark.slow
def test_a_race_is_run_and_drawn(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    rules, tokens = 4, 300
    bench = bench_on("race", tmp_path, "--rules", str(rules), "--tokens", str(tokens))
    bench.main()
    report = RaceReport.load(tmp_path / "race.json")
    lora, alora = report.lanes
    for lane in report.lanes:
        assert len(lane.verdict_s) == rules
        assert 0 < min(lane.verdict_s) <= lane.finish_s
    assert lora.computed_tokens > rules * tokens > alora.computed_tokens > tokens
    ElementTree.parse(tmp_path / "race.svg")
    printed = capsys.readouterr().out
    assert report.result in printed and "race.svg" in printed and f"{rules}/{rules}" in printed
