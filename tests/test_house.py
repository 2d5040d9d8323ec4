"""The size of the house: a budget of lines for each room. What comes in pushes something out.

A room that needs more takes it from another one in the same change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Lines of .py and .cpp, at what each has reached: lower one when it falls.
BUDGETS = {
    "guard": 5_820,
    "data": 5_180,
    "train": 6_500,
    "eval": 2_845,
    "serve": 25_675,
    "tests": 38_000,
}
ALL_SOURCE = 46_000  # of all rooms but the tests
WORDS_OF_DOCS = 40_000
WORDS_OF_README = 1_100


def lines_of(folder: Path) -> int:
    lines = 0
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".cpp"):
            lines += len(path.read_text(encoding="utf-8").splitlines())
    return lines


@pytest.mark.parametrize(("room", "budget"), BUDGETS.items())
def test_a_room_keeps_to_its_budget(room: str, budget: int) -> None:
    assert lines_of(ROOT / room) <= budget


def test_the_rooms_keep_to_their_budget_together() -> None:
    assert sum(lines_of(ROOT / room) for room in BUDGETS if room != "tests") <= ALL_SOURCE


def test_pages_and_readme_keep_to_their_words() -> None:
    words = 0
    for path in (ROOT / "docs").rglob("*.md"):
        words += len(path.read_text(encoding="utf-8").split())
    assert words <= WORDS_OF_DOCS
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= WORDS_OF_README
