"""The size of the house: a budget of lines for each room. What comes in pushes something out.

A room that needs more takes it from another one in the same change.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Lines of .py and .cpp.
BUDGETS = {
    "guard": 3600,
    "data": 4200,
    "train": 6200,
    "eval": 4000,
    "serve": 26_600,
    "tests": 38_000,
}
WORDS_OF_DOCS = 40_000
WORDS_OF_README = 1_100
STAGES = ("guard", "data", "train", "eval", "serve")
BRIEF = 5  # lines of a body that needs no docstring


def lines_of(folder: Path) -> int:
    lines = 0
    for path in folder.rglob("*"):
        if path.suffix in (".py", ".cpp"):
            lines += len(path.read_text(encoding="utf-8").splitlines())
    return lines


@pytest.mark.parametrize(("room", "budget"), BUDGETS.items())
def test_a_room_keeps_to_its_budget(room: str, budget: int) -> None:
    assert lines_of(ROOT / room) <= budget


def test_pages_and_readme_keep_to_their_words() -> None:
    words = 0
    for path in (ROOT / "docs").rglob("*.md"):
        words += len(path.read_text(encoding="utf-8").split())
    assert words <= WORDS_OF_DOCS
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= WORDS_OF_README


def test_a_public_function_of_more_than_a_few_lines_says_what_it_does() -> None:
    silent = []
    for stage in STAGES:
        for path in (ROOT / stage).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                last = node.end_lineno or node.lineno
                is_long = last - node.body[0].lineno + 1 > BRIEF
                if is_long and not node.name.startswith("_") and not ast.get_docstring(node):
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not silent
