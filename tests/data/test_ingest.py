import json
import re
from pathlib import Path
from typing import Any

import pytest

from data.ingest import LABEL_WORDS, SourcedData, Splitting, ingest
from data.rows import SourceRow, read_rows
from guard.conversation.example import SPLITS, Example
from guard.errors import GuardError
from guard.rule import load_rule

RULE = load_rule("medical_advice")
WORDS = [f"word{letter}" for letter in "abcdefghijklmno"]
IN_THIRDS = [split for split in SPLITS for _ in range(10)]
EVERYWHERE = {(split, label) for split in SPLITS for label in (0, 1)}


def _ingest(source: str, splitting: Splitting = "keep") -> SourcedData:
    return ingest(read_rows(source), source, RULE, 0, splitting)


def _examples(tmp_path: Path, rows: list[Any], splitting: Splitting = "keep") -> list[Example]:
    return _ingest(_jsonl(tmp_path, rows), splitting).examples


def _refused(source: str | Path, message: str, splitting: Splitting = "keep") -> None:
    with pytest.raises(GuardError, match=message):
        _ingest(str(source), splitting)


def _text(number: int) -> str:
    steps = range(3, 15)
    letter = chr(97 + number % 26)
    return " ".join(WORDS[(number * step + step) % len(WORDS)] + letter for step in steps)


def _rows(count: int = 60, **more: Any) -> list[dict[str, Any]]:
    return [{"text": _text(number), "label": number % 2, **more} for number in range(count)]


def _in_thirds(**more: Any) -> list[dict[str, Any]]:
    """Thirty rows, ten of each split."""
    return [row | {"split": split} for row, split in zip(_rows(30, **more), IN_THIRDS, strict=True)]


def _in_two() -> list[dict[str, Any]]:
    """Sixty training rows and twenty test rows."""
    return [row | {"split": "train" if n < 60 else "test"} for n, row in enumerate(_rows(80))]


def _jsonl(tmp_path: Path, rows: list[Any], name: str = "own.jsonl") -> str:
    """The path of a file of the rows, in JSON unless they are text."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return str(tmp_path / name)


def test_null_is_a_field_that_is_not_there_and_an_empty_group_is_none(tmp_path: Path) -> None:
    plain = _examples(tmp_path, _rows())
    assert {(example.split, example.label) for example in plain} == EVERYWHERE
    names = ("id", "split", "group", "source")
    absent: list[dict[str, Any]] = [
        dict.fromkeys((*names, "rule", "messages", "prompt", "meta")),
        dict.fromkeys(names, ""),
        {"split": "unsplit"},
        {"group": " "},
    ]
    for fields in absent:
        assert _examples(tmp_path, _rows(**fields)) == plain
    of_empty_group = _examples(tmp_path, _rows(meta={"group": "", "note": None}))
    assert len({example.group for example in of_empty_group}) == len(plain)
    zero = _examples(tmp_path, [*_rows(), {**_rows()[0], "text": "z", "group": 0}])
    assert zero[-1].group == "0"
    _refused(_jsonl(tmp_path, [{"text": "a", "label": None}]), "no label: use")


SPELLINGS = [("VIOLATES", 1), (" No ", 0), (True, 1), (False, 0), (1, 1), (0, 0), (1.0, 1)]


def test_labels_are_read_in_every_usual_spelling(tmp_path: Path) -> None:
    spellings = [*LABEL_WORDS.items(), *SPELLINGS]
    rows = _rows()
    for number, (word, _) in enumerate(spellings):
        text = " ".join(f"{number}{word}{WORDS[step]}" for step in range(12))
        rows.append({"id": number, "text": text, "label": word})
    labels = {example.id: example.label for example in _examples(tmp_path, rows)}
    assert [labels[str(number)] for number in range(len(spellings))] == [
        label for _, label in spellings
    ]


def test_given_splits_and_groups_are_kept_unless_they_are_assigned_anew(tmp_path: Path) -> None:
    rows = _rows(30)
    for number, row in enumerate(rows):
        row["split"] = ("training", "dev", "test")[number // 10]
        row["meta"] = {"group": f"g{number // 2}", "note": "n"}
    examples = _examples(tmp_path, rows)
    assert [example.split for example in examples] == IN_THIRDS
    assert examples[3].group == "g1"
    assert examples[3].meta == {"group": "g1", "note": "n", "stratum": "real"}
    examples = _examples(tmp_path, _rows(60, split="test"), "new")
    assert {(example.split, example.label) for example in examples} == EVERYWHERE
    examples = _examples(tmp_path, _in_two())  # a missing validation split is carved
    assert sum(example.split == "test" for example in examples) == 20
    assert 4 <= sum(example.split == "validation" for example in examples) <= 12


def test_near_duplicates_of_a_split_are_one_group(tmp_path: Path) -> None:
    rows = [row | {"group": f"g{number}"} for number, row in enumerate(_in_thirds())]
    rows[22]["text"] = rows[20]["text"].upper()
    examples = _examples(tmp_path, rows)
    assert examples[22].group == examples[20].group == "g20"
    assert len({example.group for example in examples}) == 29


def test_a_group_that_straddles_splits_is_found_although_its_row_has_a_twin(tmp_path: Path) -> None:
    """Two training rows have the same text, and the second has a test row's group."""
    rows = _in_two()
    rows[0]["group"] = "zA"
    rows[2] |= {"text": rows[0]["text"], "group": "CUSTOMER7", "id": "B"}
    rows[70]["group"] = "CUSTOMER7"
    told = r"1 groups have rows in more than one split \(got CUSTOMER7\)"
    _refused(_jsonl(tmp_path, rows), told)


def _bad(**fields: Any) -> dict[str, Any]:
    return {"text": "a", "label": 1} | fields


def _turns(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(turns), "label": 1} | fields


HALF = "half of a surrogate pair, which is no Unicode text, in id, group, source or meta"
BAD = [
    ('{"text": "a", "label": 1', "not valid JSON"),
    ("[1, 2]", "must be an object, got list"),
    ('{"text": "b", "label": 1, "label": 0}', "the key 'label' stands twice at column 27"),
    ({"text": "a"}, "no label: use 1, true"),
    (_bad(label="maybe"), "unknown label 'maybe'"),
    (_bad(label=2), "unknown label 2"),
    (
        {"label": 1, "body": "a"},
        "no conversation (got label, body). A row needs messages, or prompt and response, or text",
    ),
    (_bad(text=" \u200b\u2060"), "the conversation is empty"),  # nobody sees these
    (
        _turns({"role": "user", "content": [{"type": "image_url"}]}),
        "message 0 has an image, which no rule can read",
    ),
    (_bad(split="holdout"), "unknown split 'holdout': use train"),
    (_bad(meta=[1]), "meta must be an object"),
    (_bad(twin=True), "a twin is harmless, but the row violates the rule"),
    (_bad(label=0, twin="yes"), "twin must be JSON"),
    (_bad(label=0, twin=1), "twin must be true or false (got 1)"),
    (_bad(id="a\ud83d"), HALF),
    (_bad(meta={"note": "\ud83d"}), HALF),
    (_bad(text="\ud83d"), "the content is not Unicode text"),
    (
        '{"text": "a", "label": ' + "1" * 5000 + "}",
        "not valid JSON (a number has too many digits at column 24)",
    ),
    ('{"text": "a", "label": 1, "meta": ' + "[" * 50000, "not valid JSON (nested too deeply)"),
    (_bad(meta="[" * 50000), "meta must be JSON: nested too deeply"),
    (_bad(rule="pii_leak"), "the row is for the rule 'pii_leak', not 'medical_advice'"),
]


@pytest.mark.parametrize(("row", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_named_by_line_with_the_remedy(tmp_path: Path, row: Any, message: str) -> None:
    source = _jsonl(tmp_path, [*_rows(4), "", row])
    _refused(source, re.escape(f"{source}:6: ") + ".*" + re.escape(message))


def test_a_nested_row_is_taken_or_named_without_a_traceback(tmp_path: Path) -> None:
    """How deep is too deep to write differs between Pythons."""
    nested = '{"text": "a", "label": 1, "meta": ' + '{"a":' * 990 + "1" + "}" * 991
    source = _jsonl(tmp_path, [*_rows(), nested])
    try:
        assert len(_ingest(source).examples) == 61
    except GuardError as error:
        assert f"{source}:61: " in str(error) and "nested too deeply" in str(error)


@pytest.mark.parametrize(
    "rows",
    [
        [{"text": "a"}] * 30,
        [{"text": "a", "label": f"bad{number}"} for number in range(30)],
        [_turns({"role": "bot", "content": f"'{number}"}) for number in range(30)],
        ['{"text": ' * (number + 1) for number in range(30)],
    ],
    ids=["no label", "bad label", "bad role", "no JSON"],
)
def test_a_problem_of_many_rows_is_said_once_with_the_first_places(
    tmp_path: Path, rows: list[Any]
) -> None:
    source = _jsonl(tmp_path, [*_rows(3), *rows])
    with pytest.raises(GuardError) as caught:
        _ingest(source)
    message = str(caught.value)
    assert "30 bad rows" in message and message.count("more like it") == 1
    assert f"{source}:4: " in message
    assert f"(29 more like it; next {source}:5, {source}:6, {source}:7)" in message


def test_of_many_problems_twenty_are_named() -> None:
    words = [chr(97 + number) * 3 for number in range(25)]
    of_kinds = [SourceRow(f"row {word}", {}, f"the problem {word}") for word in words]
    with pytest.raises(GuardError, match="row ttt: the problem ttt\n  and 5 other problems"):
        ingest(of_kinds, "rows", RULE, 0)


@pytest.mark.parametrize("text", ["", "\n", "text,label\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.csv").write_text(text)
    _refused(tmp_path / "own.csv", "no rows: the source is empty, or has a header alone")


def test_csv_of_a_spreadsheet_is_read(tmp_path: Path) -> None:
    rows = [
        f'"is it, well,\r\n{_text(n)}?",{_text(n + 1)},{("yes", "no")[n % 2]}' for n in range(60)
    ]
    path = tmp_path / "own.csv"
    path.write_text("\r\n".join(["prompt,response,label", *rows]), "utf-8-sig", newline="")
    first = next(row for row in _ingest(str(path)).examples if row.id == f"{path}:2")
    assert [turn.role for turn in first.messages] == ["user", "assistant"]
    assert (first.messages[1].content, first.label) == (_text(1), 1)


def test_own_rows_say_which_of_them_are_twins(tmp_path: Path) -> None:
    rows = [row | {"twin": not row["label"]} for row in _rows()]
    lines = [f"{row['text']},{row['label']},{json.dumps(row['twin'])}" for row in rows]
    csv = _jsonl(tmp_path, ["text,label,twin", *lines], "own.csv")
    for examples in (_examples(tmp_path, rows), _ingest(csv).examples):
        assert [row.is_twin for row in examples] == [not row.label for row in examples]
    assert not any(row.is_twin for row in _examples(tmp_path, _rows()))


FOUR = "4 rows in 4 groups; near duplicates are one group). Each split needs 2 rows of either label"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (_rows(4), f"{FOUR}: add some in groups of their own"),
        (_rows(4, split="train"), f"{FOUR}: add some, or say SPLITS=new"),
        ([{**row, "id": "same"} for row in _rows(3)], "1 ids occur more than once (got same)"),
        ([*_rows(20), _bad(split="test")], "some rows have a split and some have none"),
        (_rows(6, split="train"), "validation has no row with label 0"),
        (_rows(8), "validation has 1 of 2 rows with label"),
        ([{"text": _text(n), "label": 0} for n in range(30)], "train has no row with label 1"),
    ],
)
def test_a_source_without_enough_rows_is_refused(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    _refused(_jsonl(tmp_path, rows), re.escape(message))
    if FOUR in message:
        _refused(_jsonl(tmp_path, rows), re.escape(f"{FOUR}: add some in groups of"), "new")


@pytest.mark.parametrize("splitting", ["keep", "new"])
def test_a_conversation_with_both_labels_is_a_bad_row(tmp_path: Path, splitting: Splitting) -> None:
    rows = _in_thirds()
    rows[2] |= {"text": "the same", "label": 0}
    rows[25] |= {"text": "the same", "label": 1}
    told = r"own.jsonl:26: label 1, but the same conversation has label 0 in .*own.jsonl:3\. Corr"
    _refused(_jsonl(tmp_path, rows), told, splitting)
    # The same words of another speaker are another conversation.
    del rows[25]["text"]
    rows[25]["messages"] = [{"role": "user", "content": "the same"}]
    assert len(_examples(tmp_path, rows, splitting)) == 30


@pytest.mark.parametrize(
    ("name", "known"),
    [("Split", "split"), ("groups", "group"), ("GROUP", "group"), ("Twins", "twin")],
)
def test_a_misspelt_field_is_no_field_that_is_left_out(
    tmp_path: Path, name: str, known: str
) -> None:
    rows = [{**row, name: "x"} for row in _rows()]
    told = f"own.jsonl:1: unknown field '{name}': write '{known}'"
    _refused(_jsonl(tmp_path, rows), told)
    if known == "group":  # beside the field itself it is another one
        both = [{**row, known: f"x{number}"} for number, row in enumerate(rows)]
        assert len(_examples(tmp_path, both)) == len(both)
