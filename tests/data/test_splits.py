import random
import re
from dataclasses import replace

import pytest

from data.splits import NEAR_DUPLICATE, assign, near_duplicates, refuse_leaks, shingles
from guard.conversation.example import SPLITS, Example, Message
from guard.errors import GuardError

WORDS = [f"word{letter}{variant}" for letter in "abcdefghij" for variant in "klmnopqrst"]


def _row(number: int, text: str, split: str = "train", group: str = "", label: int = 0) -> Example:
    messages, group = (Message("user", text),), group or f"g{number}"
    return Example(f"e{number}", "r", messages, label, split, "s", group)  # type: ignore[arg-type]


def _rows(*texts: str | tuple[str, str]) -> list[Example]:
    """A row of each text, in the training split or in the one beside the text."""
    rows = []
    for number, text in enumerate(texts):
        rows.append(_row(number, *([text] if isinstance(text, str) else text)))
    return rows


def _text(seed: int, words: int = 40) -> str:
    return " ".join(random.Random(seed).sample(WORDS, words))


def _found(rows: list[Example]) -> list[tuple[int, int]]:
    return [(pair.first, pair.second) for pair in near_duplicates(rows)]


def test_an_exact_copy_or_a_group_in_another_split_is_refused() -> None:
    with pytest.raises(GuardError, match=r"e0 \(train\) and e1 \(test\): 1.00"):
        refuse_leaks(_rows(_text(0), (_text(0), "test")))
    with pytest.raises(GuardError, match="1 groups have rows in more than one split"):
        refuse_leaks([_row(0, _text(0), group="g"), _row(1, _text(1), "test", group="g")])
    # Inside of a split duplicates are no leak.
    refuse_leaks(_rows(_text(0), _text(0), (_text(1), "test"), (_text(1), "test")))
    # Two changed words in forty are still a duplicate, and ten are not.
    words = _text(0).split()
    few, many = list(words), list(words)
    few[10], few[11] = "other", "words"
    many[5:35:3] = ["other"] * 10
    assert _found(_rows(_text(0), " ".join(few), " ".join(many))) == [(0, 1)]


def test_similarity_is_the_jaccard_index_of_shingles_whatever_the_digits_and_capitals() -> None:
    text, variant = "a b c d e f g h i j", "a b c d e f g h i k"
    first, second = set(shingles(text)), set(shingles(variant))
    expected = len(first & second) / len(first | second)
    (pair,) = near_duplicates(_rows(text, variant), threshold=0.1)
    assert pair.similarity == pytest.approx(expected)
    assert 0.1 < expected < NEAR_DUPLICATE
    text, variant = f"{_text(0)} 555 1234", f"{_text(0).upper()} 555 9876"
    assert [pair.similarity for pair in near_duplicates(_rows(text, variant))] == [1.0]


def test_duplicates_are_found_across_block_borders_and_of_one_word() -> None:
    assert _found(_rows(*map(_text, range(700)), _text(3))) == [(3, 700)]
    assert _found(_rows("hello", "Hello!", "bye")) == [(0, 1)]


def _many(count: int = 400) -> list[Example]:
    rng = random.Random(1)
    rows = []
    for number in range(count):
        group, label = f"g{rng.randrange(count // 3)}", int(rng.random() < 0.3)
        rows.append(_row(number, _text(number), group=group, label=label))
    return rows


def test_an_assigned_split_keeps_groups_whole_and_shares_and_labels_even() -> None:
    examples = assign(_many(), seed=0)
    refuse_leaks(examples)
    overall = sum(example.label for example in examples) / len(examples)
    sizes = {"train": (280, 12), "validation": (40, 8), "test": (80, 10)}
    for split, (rows, margin) in sizes.items():
        part = [example.label for example in examples if example.split == split]
        assert len(part) == pytest.approx(rows, abs=margin)
        assert sum(part) / len(part) == pytest.approx(overall, abs=0.06)


def test_an_assigned_split_depends_on_the_seed_only_and_keeps_near_duplicates_together() -> None:
    rows = _many(90)
    assert assign(rows, 5) == assign(rows, 5)
    assert assign(rows, 5) != assign(rows, 6)
    twins = [_row(1000 + n, row.messages[0].content, label=row.label) for n, row in enumerate(rows)]
    split = assign([*rows, *twins], seed=0)
    refuse_leaks(split)
    assert len({row.group for row in split}) == len({row.group for row in rows})


CHINESE = "".join(chr(0x4E00 + 37 * number) for number in range(50))
THAI = "ผมปวดหัวมากตั้งแต่เมื่อเช้านี้ควรกินยาอะไรดีครับแล้วต้องกินวันละกี่เม็ดหลังอาหาร"


@pytest.mark.parametrize("text", [CHINESE, THAI], ids=["Chinese", "Thai"])
def test_a_near_duplicate_is_found_where_words_are_not_set_apart_by_spaces(text: str) -> None:
    assert _found(_rows(text, text[:25] + "字" + text[26:])) == [(0, 1)]
    assert _found(_rows(text, text[::-1])) == []


SPACED = ("Take 800 mg_x of it, naïve Ünal's don't", "Прими две таблетки", "두통이 너무 심해요")


@pytest.mark.parametrize("text", [*SPACED, "दो गोलियाँ लें", ""])
def test_words_stay_words_in_scripts_with_spaces(text: str) -> None:
    words = ["^", "^", *re.findall(r"\w+", re.sub(r"\d", "0", text.lower())), "$", "$"]
    assert shingles(text) == [" ".join(words[start : start + 3]) for start in range(len(words) - 2)]


def _prompted(number: int, system: str, text: str) -> Example:
    messages = (Message("system", system), Message("user", text))
    return replace(_row(number, text, label=number % 2), messages=messages)


def test_a_system_prompt_that_rows_share_makes_them_no_near_duplicates() -> None:
    system = " ".join(WORDS) * 3
    rows = [_prompted(number, f"{system} {number}", _text(number, 20)) for number in range(60)]
    assert _found(rows) == []
    assert {example.split for example in assign(rows, 0)} == set(SPLITS)
    kept = [replace(row, split="test") for row in rows[:20]] + rows[20:]
    refuse_leaks(kept)
    twins = [_prompted(0, system, _text(0)), _prompted(1, system, _text(0))]
    assert [pair.similarity for pair in near_duplicates(twins)] == [1.0]
    # Nor do different ones make short turns near duplicates, unless they are nearly the same too.
    assert _found([_prompted(0, _text(0), "hello"), _prompted(1, _text(1), "hello")]) == []
    same = [_prompted(0, _text(0), "hello"), _prompted(1, f"{_text(0)} other", "Hello!")]
    (pair,) = near_duplicates(same)
    assert NEAR_DUPLICATE < pair.similarity < 1.0
