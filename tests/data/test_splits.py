import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from data.splits import (
    NEAR_DUPLICATE,
    assign,
    drop_leaks,
    group_near_duplicates,
    labels_scarce,
    near_duplicates,
    refuse_leaks,
    shingles,
)
from guard.conversation.example import Example, Message
from guard.errors import GuardError

WORDS = [f"word{letter}{variant}" for letter in "abcdefghij" for variant in "klmnopqrst"]


def _example(
    number: int, text: str, split: str = "train", group: str = "", label: int = 0
) -> Example:
    return Example(
        f"e{number}", "r", (Message("user", text),), label, split, "s", group or f"g{number}"
    )  # type: ignore[arg-type]


def _text(seed: int, words: int = 40) -> str:
    return " ".join(random.Random(seed).sample(WORDS, words))


def test_an_exact_copy_in_another_split_is_refused() -> None:
    with pytest.raises(GuardError, match=r"e0 \(train\) and e1 \(test\): 1.00"):
        refuse_leaks([_example(0, _text(0)), _example(1, _text(0), "test")])


def test_two_changed_words_in_forty_are_still_a_duplicate_and_ten_are_not() -> None:
    words = _text(0).split()
    few, many = list(words), list(words)
    few[10], few[11] = "other", "words"
    many[5:35:3] = ["other"] * 10
    with pytest.raises(GuardError, match="1 near duplicates across splits"):
        refuse_leaks([_example(0, " ".join(words)), _example(1, " ".join(few), "validation")])
    refuse_leaks([_example(0, " ".join(words)), _example(1, " ".join(many), "validation")])


def test_other_digits_and_other_capitals_do_not_hide_a_duplicate() -> None:
    text, variant = f"{_text(0)} 555 1234", f"{_text(0).upper()} 555 9876"
    assert [
        pair.similarity for pair in near_duplicates([_example(0, text), _example(1, variant)])
    ] == [1.0]


def test_duplicates_inside_a_split_or_a_group_are_no_leak() -> None:
    refuse_leaks(
        [
            _example(0, _text(0)),
            _example(1, _text(0)),
            _example(2, _text(1), "test"),
            _example(3, _text(1), "test"),
        ]
    )


def test_similarity_is_the_jaccard_index_of_shingles() -> None:
    text, variant = "a b c d e f g h i j", "a b c d e f g h i k"
    first, second = set(shingles(text)), set(shingles(variant))
    expected = len(first & second) / len(first | second)
    pair = next(near_duplicates([_example(0, text), _example(1, variant)], threshold=0.1))
    assert pair.similarity == pytest.approx(expected)
    assert 0.1 < expected < NEAR_DUPLICATE


def test_duplicates_are_found_across_block_borders() -> None:
    examples = [_example(number, _text(number)) for number in range(700)]
    examples.append(_example(700, _text(3)))
    assert [(pair.first, pair.second) for pair in near_duplicates(examples)] == [(3, 700)]


def test_one_word_texts_are_compared_too() -> None:
    assert (
        len(
            list(near_duplicates([_example(0, "hello"), _example(1, "Hello!"), _example(2, "bye")]))
        )
        == 1
    )


def test_a_group_in_two_splits_is_refused() -> None:
    with pytest.raises(GuardError, match="1 groups have rows in more than one split"):
        refuse_leaks([_example(0, _text(0), group="g"), _example(1, _text(1), "test", group="g")])


def test_dropping_takes_the_training_row_and_leaves_the_test_whole() -> None:
    rows = [
        _example(0, _text(0), "test"),
        _example(1, _text(0)),
        _example(2, _text(1)),
        _example(3, _text(1), "validation"),
    ]
    assert [row.id for row in drop_leaks(rows)] == ["e0", "e3"]


def test_cleaning_keeps_a_straddling_group_in_its_latest_split_only() -> None:
    rows = [
        _example(0, _text(0), group="g"),
        _example(1, _text(1), "test", group="g"),
        _example(2, _text(2), group="h"),
    ]
    assert [row.id for row in drop_leaks(rows)] == ["e1", "e2"]


def _many(count: int = 400) -> list[Example]:
    rng = random.Random(1)
    return [
        _example(n, _text(n), group=f"g{rng.randrange(count // 3)}", label=int(rng.random() < 0.3))
        for n in range(count)
    ]


def test_an_assigned_split_keeps_groups_whole_and_shares_and_labels_even() -> None:
    examples = assign(_many(), seed=0)
    refuse_leaks(examples)
    counts = Counter(example.split for example in examples)
    assert counts["train"] == pytest.approx(280, abs=12)
    assert counts["validation"] == pytest.approx(40, abs=8)
    assert counts["test"] == pytest.approx(80, abs=10)
    overall = sum(example.label for example in examples) / len(examples)
    for split in counts:
        part = [example.label for example in examples if example.split == split]
        assert sum(part) / len(part) == pytest.approx(overall, abs=0.06)


def test_an_assigned_split_depends_on_the_seed_only() -> None:
    examples = _many(90)
    assert assign(examples, 5) == assign(examples, 5)
    assert assign(examples, 5) != assign(examples, 6)


def test_near_duplicates_are_assigned_to_one_split() -> None:
    rows = _many(60)
    twins = [
        _example(1000 + n, row.messages[0].content, label=row.label) for n, row in enumerate(rows)
    ]
    refuse_leaks(assign([*rows, *twins], seed=0))


def test_scarce_labels_are_named() -> None:
    rows = [
        _example(0, "a", label=1),
        _example(1, "b"),
        _example(2, "c", "validation", label=1),
        _example(3, "d", "test"),
    ]
    assert labels_scarce(rows, 1) == [
        "validation has no row with label 0",
        "test has no row with label 1",
    ]
    assert labels_scarce([*rows, *rows], 2) == labels_scarce(rows, 1)
    assert "train has 1 of 2 rows with label 1" in labels_scarce(rows, 2)


CHINESE = "".join(chr(0x4E00 + 37 * number) for number in range(50))
THAI = "ผมปวดหัวมากตั้งแต่เมื่อเช้านี้ควรกินยาอะไรดีครับแล้วต้องกินวันละกี่เม็ดหลังอาหาร"
JAPANESE = (
    "きのうの夜から頭が痛くてねむれませんでしたがこの薬はいち"
    "にちに何回のめばいいのでしょうか教えてください"
)


@pytest.mark.parametrize("text", [CHINESE, THAI, JAPANESE], ids=["Chinese", "Thai", "Japanese"])
def test_a_near_duplicate_is_found_where_words_are_not_set_apart_by_spaces(text: str) -> None:
    variant = text[:25] + "字" + text[26:]
    with pytest.raises(GuardError, match="1 near duplicates across splits"):
        refuse_leaks([_example(0, text), _example(1, variant, "test")])
    refuse_leaks([_example(0, text), _example(1, text[::-1], "test")])


@pytest.mark.parametrize(
    "text",
    [
        "Take 800 mg_x of it, naïve Ünal's don't",
        "Прими две таблетки",
        "두통이 너무 심해요",
        "दो गोलियाँ लें",
        "",
    ],
)
def test_words_stay_words_in_scripts_with_spaces(text: str) -> None:
    words = ["^", "^", *re.findall(r"\w+", re.sub(r"\d", "0", text.lower())), "$", "$"]
    assert shingles(text) == [" ".join(words[start : start + 3]) for start in range(len(words) - 2)]


def test_near_duplicates_are_one_group_after_assigning() -> None:
    rows = assign(
        [
            _example(0, _text(0)),
            _example(1, _text(0)),
            _example(2, _text(1)),
            _example(3, _text(2)),
        ],
        seed=0,
    )
    assert len({row.group for row in rows}) == 3


def _prompted(number: int, system: str, text: str, split: str = "train") -> Example:
    messages = (Message("system", system), Message("user", text))
    return replace(_example(number, text, split, label=number % 2), messages=messages)


def test_a_system_prompt_that_rows_share_makes_them_no_near_duplicates() -> None:
    system = " ".join(WORDS) * 3
    rows = [_prompted(number, f"{system} {number}", _text(number, 20)) for number in range(60)]
    assert list(near_duplicates(rows)) == []
    assert {example.split for example in assign(rows, 0)} == {"train", "validation", "test"}
    kept = [
        replace(row, split="test" if number < 20 else "train") for number, row in enumerate(rows)
    ]
    refuse_leaks(kept)
    assert len(drop_leaks(kept)) == 60
    twins = [_prompted(0, system, _text(0)), _prompted(1, system, _text(0))]
    assert [pair.similarity for pair in near_duplicates(twins)] == [1.0]


def test_short_turns_after_different_system_prompts_are_no_near_duplicates() -> None:
    rows = [_prompted(0, _text(0), "hello"), _prompted(1, _text(1), "hello")]
    assert list(near_duplicates(rows)) == []
    same = [_prompted(0, _text(0), "hello"), _prompted(1, f"{_text(0)} other", "Hello!")]
    (pair,) = near_duplicates(same)
    assert NEAR_DUPLICATE < pair.similarity < 1.0


def test_near_duplicates_of_one_split_count_as_one_group_and_of_two_splits_do_not() -> None:
    rows = [
        _example(0, _text(0)),
        _example(1, _text(0)),
        _example(2, _text(0), "test"),
        _example(3, _text(1), "test"),
    ]
    assert [row.group for row in group_near_duplicates(rows)] == ["g0", "g0", "g2", "g3"]
