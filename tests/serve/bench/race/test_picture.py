"""The animated picture: well-formed, and its times are those of the measurement."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from serve.bench.race.picture import HOLD_S, LONGEST_S, RacePicture
from serve.bench.race.report import RaceReport
from tests.serve.bench.race.toy_race import RULES, toy_race

SVG = "{http://www.w3.org/2000/svg}"


def drawn(report: RaceReport) -> ElementTree.Element:
    return ElementTree.fromstring(RacePicture(report).svg())


def words(picture: ElementTree.Element) -> str:
    """The text that stands there without animation."""
    texts = []
    for text in picture.iter(f"{SVG}text"):
        if text.attrib.get("visibility") != "hidden":
            texts.append(text.text or "")
    return " ".join(texts)


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


def test_a_long_race_is_shown_faster_and_says_so() -> None:
    report = toy_race(lora_s=60.0, alora_s=0.8)
    cells = cells_by_time(drawn(report), cycle_s=LONGEST_S + HOLD_S)
    assert max(cells) == pytest.approx(LONGEST_S, abs=0.01) and cells[0.2] == RULES
    shown = words(drawn(report))
    assert "Shown 4.0 times as fast as measured." in shown and "60.0 s" in shown


def test_key_times_rise_within_a_cycle_and_go_with_the_values() -> None:
    for animation in drawn(toy_race()).iter(f"{SVG}animate"):
        times = [float(time) for time in animation.attrib["keyTimes"].split(";")]
        assert times[0] == 0 and times == sorted(set(times)) and times[-1] < 1
        assert len(times) == animation.attrib["values"].count(";") + 1
        assert animation.attrib["repeatCount"] == "indefinite"


def test_the_picture_stands_alone_and_is_small() -> None:
    svg = RacePicture(toy_race(lora_s=300.0, alora_s=3.0)).svg()
    assert len(svg.encode()) < 100_000
    assert "href" not in svg and "<script" not in svg and "url(" not in svg
    assert "prefers-color-scheme:dark" in svg


def test_without_animation_it_shows_the_end_with_times_ratio_and_origin() -> None:
    shown = words(drawn(toy_race()))
    for text in ("12.0 s", "0.20 s", "aLoRA is 60x as fast", "two cores", "abc1234"):
        assert text in shown
