from pathlib import Path
from typing import Any

import pytest

from data.generator.excerpt_checks import check_excerpts
from data.generator.excerpts import Excerpt, ExcerptBook
from data.generator.library import load_excerpts
from data.generator.phrasebook import cores_of
from guard.errors import GuardError
from guard.rule import load_rule

VALUES = tuple(f"value{number}" for number in range(5))
EITHER = tuple(f"{word} it was {{n.?}} in {{n.?}}" for word in ("well", "no", "oh", "yes", "so"))


def check(slots: dict[str, tuple[str, ...]], excerpts: dict[str, Excerpt]) -> None:
    book = ExcerptBook(rule="toxicity", slots=slots, excerpts=excerpts)
    check_excerpts(load_rule("toxicity"), book, Path("toy.yaml"))


def check_either(values: tuple[str, ...] = VALUES, **changes: tuple[str, ...]) -> None:
    fields = {"layouts": ("tool: {text} >> user: *",), "either": EITHER} | changes
    slots = {"n": values, "text": ("{n}, {n.2}",), "wrong": ("{n.5}",)}
    check(slots, {"toy": Excerpt(**fields)})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rule": "toxicity_2"}, "rule differs"),
        ({"layouts": "user: nothing here"}, "one hole"),
        ({"layouts": "user: * and *"}, "one hole"),
        ({"does": "a\nb"}, "too few lines"),
        ({"does": "a\na\nb\nc\nd"}, "repeats a line"),
        ({"allowed": "a {unknown}\nb\nc\nd"}, "unknown slot"),
        ({"allowed": "a #\nb\nc\nd"}, "digit's mark"),
        ({"registers": "{user: [shouted]}"}, "unknown register"),
    ],
)
def test_a_book_that_cannot_be_used_is_refused(
    tmp_path: Path, change: dict[str, str], problem: str
) -> None:
    lines = {"layouts": "user: *", "does": "a\nb\nc\nd", "allowed": "e\nf\ng\nh"} | change
    rule = lines.pop("rule", "toxicity")
    registers = lines.pop("registers", "{}")
    text = f"rule: {rule}\nslots: {{}}\nexcerpts:\n  chat:\n    registers: {registers}\n"
    for key, block in lines.items():
        indented = block.replace("\n", "\n      ")
        text += f"    {key}: |\n      {indented}\n"
    (tmp_path / "toxicity.yaml").write_text(text)
    with pytest.raises(GuardError, match=problem):
        load_excerpts(load_rule("toxicity"), tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"does": ("a", "b", "c", "d")}, "cannot stand beside"),
        ({"either": ("it was {n}",)}, "nothing that can be wrong"),
        ({"either": ("it was.?",)}, "nothing that can be wrong"),
        ({"either": ("(it was {n.?}|no idea)",)}, "or not always"),
        ({"either": ("{n.?} and {n.2.?}",)}, "malformed slot"),
        ({"either": ("{m.?}",)}, "a layout does not say 'm'"),
        ({"layouts": ("tool: {text} >> user: *", "user: *")}, "a layout does not say 'n'"),
        ({"layouts": ("tool: {text}, {wrong} >> user: *",)}, "number of the wrong 'n'"),
        ({"layouts": ("tool: {text}, {n.?} >> user: *",)}, "malformed slot"),
        ({"values": VALUES[:4]}, "too few values"),
        ({"values": (*VALUES[:4], *VALUES[:3])}, "too few values"),
        ({"values": tuple(map(str, range(12)))}, "too few values"),  # three of them held out
    ],
)
def test_a_form_of_either_in_which_wrong_could_be_right_is_refused(
    change: dict[str, Any], problem: str
) -> None:
    check_either()
    with pytest.raises(GuardError, match=problem):
        check_either(**change)


def test_a_line_that_is_held_out_in_one_block_and_trained_on_in_another_is_refused() -> None:
    lines = tuple(f"line {number}" for number in range(9))
    held = cores_of(lines, "unseen")[0]
    others = (tuple(f"{word} {number}" for number in range(8)) for word in ("a", "b", "c", "d"))
    block = next((*other, held) for other in others if held in cores_of((*other, held), "seen"))
    one = Excerpt(layouts=("user: *",), does=tuple("klmno"), allowed=lines)
    for allowed in (lines, block):
        other = Excerpt(layouts=("user: *",), does=tuple("klmno"), allowed=allowed)
        excerpts = {"one": one, "other": other}
        if allowed == lines:
            check({}, excerpts)
            continue
        with pytest.raises(GuardError, match="held out in one block and not in another"):
            check({}, excerpts)
