import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from data.ingest import LABEL_WORDS, Ingested, Splitting, ingest
from data.rows import SourceRow, read_rows
from guard.conversation.example import SPLITS, Message
from guard.errors import GuardError
from guard.rule import Rule, load_rule

RULE = load_rule("medical_advice")
WORDS = [
    "red",
    "green",
    "blue",
    "round",
    "square",
    "heavy",
    "light",
    "early",
    "late",
    "warm",
    "cold",
    "north",
    "south",
    "old",
    "new",
]


def _ingest(source: str, rule: Rule, seed: int, splitting: Splitting = "keep") -> Ingested:
    return ingest(read_rows(source), source, rule, seed, splitting)


def _text(number: int) -> str:
    return " ".join(
        WORDS[(number * step + step) % len(WORDS)] + chr(97 + number % 26) for step in range(3, 15)
    )


def _rows(count: int = 60, **more: Any) -> list[dict[str, Any]]:
    return [{"text": _text(number), "label": number % 2, **more} for number in range(count)]


def _jsonl(tmp_path: Path, rows: list[Any], name: str = "own.jsonl") -> str:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return str(path)


def _csv(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    path = tmp_path / "own.csv"
    with path.open(
        "w", newline="", encoding="utf-8-sig"
    ) as file:  # as a spreadsheet program saves it
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.mark.parametrize("name", ["own.jsonl", "own.jsonl.gz"])
def test_json_lines_without_splits_are_split_with_both_labels_everywhere(
    tmp_path: Path, name: str
) -> None:
    examples = _ingest(_jsonl(tmp_path, _rows(), name), RULE, seed=0).examples
    assert len(examples) == 60
    assert {(example.split, example.label) for example in examples} == {
        (split, label) for split in SPLITS for label in (0, 1)
    }
    assert {example.meta["stratum"] for example in examples} == {"real"}
    assert {example.rule for example in examples} == {"medical_advice"}


def test_csv_reads_like_json_lines(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"is it, well,\n{_text(n)}?",
            "response": _text(n + 1),
            "label": ("yes", "no")[n % 2],
            "group": f"g{n // 2}",
        }
        for n in range(60)
    ]
    examples = _ingest(_csv(tmp_path, rows), RULE, seed=0).examples
    assert len(examples) == 60
    first = next(example for example in examples if example.id.endswith(":2"))
    assert first.messages == (
        Message("user", rows[0]["prompt"]),
        Message("assistant", rows[0]["response"]),
    )
    assert first.label == 1


def test_messages_in_a_csv_cell_are_json(tmp_path: Path) -> None:
    rows = [
        {"messages": json.dumps([{"role": "tool", "content": _text(n)}]), "label": n % 2}
        for n in range(60)
    ]
    assert _ingest(_csv(tmp_path, rows), RULE, seed=0).examples[0].messages[0].role == "tool"


def test_a_data_set_folder_reads_like_a_hub_data_set(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for split, start in (("train", 0), ("validation", 100), ("test", 200)):
        _jsonl(
            folder, [{"text": _text(start + n), "label": n % 2} for n in range(6)], f"{split}.jsonl"
        )
    examples = _ingest(f"hub:{folder}", RULE, seed=0).examples
    assert [example.split for example in examples] == ["train"] * 6 + ["validation"] * 6 + [
        "test"
    ] * 6
    assert examples[7].messages == (Message("assistant", _text(101)),)


def test_an_unknown_data_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="cannot load the data set"):
        _ingest(f"hub:{tmp_path / 'nothing'}", RULE, seed=0)


def _labelled(tmp_path: Path, names: list[str], indices: tuple[int, int]) -> str:
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    rows = {
        "text": [_text(number) for number in range(60)],
        "label": [indices[number % 2] for number in range(60)],
    }
    (tmp_path / "set").mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "set" / "train.parquet")
    return f"hub:{tmp_path / 'set'}"


@pytest.mark.parametrize(
    ("names", "violating"), [(["no", "yes"], 1), (["Violation", "allowed"], 0), (["1", "0"], 0)]
)
def test_a_class_label_means_its_name_not_its_index(
    tmp_path: Path, names: list[str], violating: int
) -> None:
    examples = _ingest(
        _labelled(tmp_path, names, (violating, 1 - violating)), RULE, seed=0
    ).examples
    assert {e.messages[0].content: e.label for e in examples} == {
        _text(number): 1 - number % 2 for number in range(60)
    }


@pytest.mark.parametrize(
    ("names", "indices", "message"),
    [
        (
            ["harmful", "harmless"],
            (0, 1),
            "unknown label 'harmful': use 1, true, yes, violates, violation for a violation, 0,",
        ),
        (["unsafe", "safe"], (1, 0), "unknown label 'safe'"),
        (["violation", "ok"], (0, 1), "unknown label 'ok'"),
        (["no", "yes"], (0, -1), "unknown label -1"),
    ],
)
def test_a_class_label_of_another_name_is_refused_whatever_its_index(
    tmp_path: Path, names: list[str], indices: tuple[int, int], message: str
) -> None:
    with pytest.raises(GuardError, match=re.escape(message)):
        _ingest(_labelled(tmp_path, names, indices), RULE, seed=0)


def test_null_is_a_field_that_is_not_there(tmp_path: Path) -> None:
    nothing: dict[str, Any] = dict.fromkeys(
        ("id", "split", "group", "source", "rule", "messages", "prompt")
    )
    plain = _ingest(_jsonl(tmp_path, _rows()), RULE, seed=0).examples
    assert (
        _ingest(
            _jsonl(tmp_path, _rows(**nothing, meta={"group": None, "note": None})), RULE, seed=0
        ).examples
        == plain
    )
    assert _ingest(_jsonl(tmp_path, _rows(meta=None)), RULE, seed=0).examples == plain
    empty: dict[str, Any] = dict.fromkeys(("id", "split", "group", "source"), "")
    assert _ingest(_jsonl(tmp_path, _rows(**empty)), RULE, seed=0).examples == plain
    with pytest.raises(GuardError, match="no label: use"):
        _ingest(_jsonl(tmp_path, [{"text": "a", "label": None}]), RULE, seed=0)


@pytest.mark.parametrize(
    ("word", "label"),
    [
        *LABEL_WORDS.items(),
        ("VIOLATES", 1),
        (" No ", 0),
        (True, 1),
        (False, 0),
        (1, 1),
        (0, 0),
        (1.0, 1),
    ],
)
def test_labels_are_read_in_every_usual_spelling(tmp_path: Path, word: Any, label: int) -> None:
    rows = [*_rows(), {"id": "x", "text": "the row in question", "label": word}]
    assert (
        next(e.label for e in _ingest(_jsonl(tmp_path, rows), RULE, seed=0).examples if e.id == "x")
        == label
    )


def test_given_splits_and_groups_are_kept(tmp_path: Path) -> None:
    rows = _rows(30)
    for number, row in enumerate(rows):
        row |= {
            "split": ("training", "dev", "test")[number // 10],
            "meta": {"group": f"g{number // 2}", "note": "n"},
        }
    examples = _ingest(_jsonl(tmp_path, rows), RULE, seed=0).examples
    assert [example.split for example in examples] == ["train"] * 10 + ["validation"] * 10 + [
        "test"
    ] * 10
    assert examples[3].group == "g1"
    assert examples[3].meta == {"group": "g1", "note": "n", "stratum": "real"}


@pytest.mark.parametrize("splitting", ["keep", "clean"])
def test_near_duplicates_within_a_given_split_are_one_group(
    tmp_path: Path, splitting: Splitting
) -> None:
    rows = _rows(30)
    for number, row in enumerate(rows):
        row |= {"split": SPLITS[number // 10], "group": f"g{number}"}
    rows[22]["text"] = rows[20]["text"].upper()
    examples = _ingest(_jsonl(tmp_path, rows), RULE, 0, splitting).examples
    assert examples[22].group == examples[20].group == "g20"
    assert len({example.group for example in examples}) == 29


@pytest.mark.parametrize("text", ["\u200b\u200b", "\u200d", " \u2060 "])
def test_a_text_that_nobody_sees_is_empty(tmp_path: Path, text: str) -> None:
    with pytest.raises(GuardError, match=r"own\.jsonl:61: the conversation is empty"):
        _ingest(_jsonl(tmp_path, [*_rows(), {"text": text, "label": 1}]), RULE, seed=0)


def test_rows_that_share_a_long_system_prompt_are_split(tmp_path: Path) -> None:
    system = {"role": "system", "content": " ".join(WORDS * 20)}
    rows = []
    for row in _rows(60):
        turn = {"role": "user", "content": row["text"]}
        rows.append({"messages": [system, turn], "label": row["label"]})
    examples = _ingest(_jsonl(tmp_path, rows), RULE, seed=0).examples
    assert {example.split for example in examples} == set(SPLITS)


def test_given_splits_can_be_assigned_anew(tmp_path: Path) -> None:
    rows = [{**row, "split": "test"} for row in _rows(60)]
    examples = _ingest(_jsonl(tmp_path, rows), RULE, seed=0, splitting="new").examples
    assert {(example.split, example.label) for example in examples} == {
        (split, label) for split in SPLITS for label in (0, 1)
    }


def test_a_split_called_unsplit_is_none(tmp_path: Path) -> None:
    plain = _ingest(_jsonl(tmp_path, _rows()), RULE, seed=0)
    assert _ingest(_jsonl(tmp_path, _rows(split="unsplit")), RULE, seed=0) == plain


def test_a_missing_validation_split_is_carved_from_training(tmp_path: Path) -> None:
    rows = _rows(80)
    for number, row in enumerate(rows):
        row["split"] = "train" if number < 60 else "test"
    examples = _ingest(_jsonl(tmp_path, rows), RULE, seed=0).examples
    assert sum(example.split == "test" for example in examples) == 20
    assert 4 <= sum(example.split == "validation" for example in examples) <= 12


@pytest.mark.parametrize(("splitting", "has_split"), [("keep", False), ("new", True)])
def test_too_few_rows_to_assign_ask_for_more_rows_and_not_for_new_splits(
    tmp_path: Path, splitting: Splitting, has_split: bool
) -> None:
    rows = [row | ({"split": "train"} if has_split else {}) for row in _rows(4)]
    with pytest.raises(
        GuardError,
        match=r"4 rows in 4 groups; near duplicates are one group\).*add some in groups of their "
        r"own$",
    ):
        _ingest(_jsonl(tmp_path, rows), RULE, seed=0, splitting=splitting)


def test_duplicates_across_given_splits_can_be_dropped_from_training(tmp_path: Path) -> None:
    rows = _rows(60)
    for number, row in enumerate(rows):
        row["split"] = SPLITS[number // 20]
    rows[45]["text"] = rows[3]["text"]
    kept = _ingest(_jsonl(tmp_path, rows), RULE, seed=0, splitting="clean").examples
    assert len(kept) == 59
    assert sum(example.split == "test" for example in kept) == 20
    assert _ingest(_jsonl(tmp_path, rows), RULE, seed=0, splitting="clean").dropped == 1


def _straddling(tmp_path: Path) -> str:
    """Two training rows of the same text, of whom the second has a test row's group."""
    rows = [
        {**row, "split": "train" if number < 60 else "test"} for number, row in enumerate(_rows(80))
    ]
    rows[0]["group"] = "zA"
    rows[2] |= {"text": rows[0]["text"], "group": "CUSTOMER7", "id": "B"}
    rows[70]["group"] = "CUSTOMER7"
    return _jsonl(tmp_path, rows)


def test_a_group_that_straddles_given_splits_is_found_although_its_row_has_a_twin_in_another_group(
    tmp_path: Path,
) -> None:
    source = _straddling(tmp_path)
    with pytest.raises(
        GuardError, match=r"1 groups have rows in more than one split \(got CUSTOMER7\)"
    ):
        _ingest(source, RULE, seed=0)
    cleaned = _ingest(source, RULE, seed=0, splitting="clean")
    assert (cleaned.dropped, len(cleaned.examples)) == (1, 79)
    assert "B" not in {example.id for example in cleaned.examples}
    assert {example.split for example in cleaned.examples if example.group == "CUSTOMER7"} == {
        "test"
    }
    assert {example.split for example in cleaned.examples} == set(SPLITS)


BAD = [
    ('{"text": "a", "label": 1', "not valid JSON"),
    ("[1, 2]", "must be an object, got list"),
    ({"text": "a"}, "no label: use 1, true"),
    ({"text": "a", "label": "maybe"}, "unknown label 'maybe'"),
    ({"text": "a", "label": 2}, "unknown label 2"),
    (
        {"label": 1, "body": "a"},
        "no conversation (got label, body). A row needs messages, or prompt and response, or text",
    ),
    ({"text": 5, "label": 1}, "text must be text"),
    ({"text": "  ", "label": 1}, "the conversation is empty"),
    ({"prompt": "a", "label": 1}, "prompt and response must both be there"),
    ({"messages": [], "label": 1}, "messages must be a non-empty list"),
    (
        {"messages": [{"role": "bot", "content": "a"}], "label": 1},
        "turn 0 must be {role, content} as OpenAI has it: role: Input should be",
    ),
    ({"messages": [{"role": "user"}], "label": 1}, "the conversation is empty"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "label": 1},
        "message 0 has an image, which no rule can read",
    ),
    (
        {"messages": [{"role": "user", "content": "a"}], "tools": {"a": 1}, "label": 1},
        "tools must be",
    ),
    ({"messages": "[{", "label": 1}, "messages must be JSON"),
    ({"text": "a", "label": 1, "split": "holdout"}, "unknown split 'holdout': use train"),
    ({"text": "a", "label": 1, "meta": [1]}, "meta must be an object"),
    (
        {"text": "a", "label": 1, "id": "a\ud83d"},
        "half of a surrogate pair, which is no Unicode text, in id, group, source or meta",
    ),
    ({"text": "a", "label": 1, "group": "\ud83d"}, "half of a surrogate pair"),
    ({"text": "a", "label": 1, "source": "\ud83d"}, "half of a surrogate pair"),
    (
        {"text": "a", "label": 1, "meta": {"note": "\ud83d"}},
        r"half of a surrogate pair, which is no Unicode text, in id, group, source or",
    ),
    ({"text": "a", "label": 1, "meta": {"\ud83d": 1}}, "half of a surrogate pair"),
    ({"text": "\ud83d", "label": 1}, "the content is not Unicode text"),
    pytest.param(
        '{"text": "a", "label": ' + "1" * 5000 + "}",
        "not valid JSON (a number has too many digits at column 24)",
        id="5000 digits",
    ),
    pytest.param(
        '{"text": "a", "label": 1, "meta": ' + "[" * 50000,
        "not valid JSON (nested too deeply)",
        id="deep",
    ),
    pytest.param(
        {"text": "a", "label": 1, "meta": "[" * 50000},
        "meta must be JSON: nested too deeply",
        id="deep meta",
    ),
    (
        {"text": "a", "label": 1, "rule": "pii_leak"},
        "the row is for the rule 'pii_leak', not 'medical_advice'",
    ),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_named_by_line_with_the_remedy(tmp_path: Path, row: Any, message: str) -> None:
    source = _jsonl(tmp_path, [*_rows(4), "", row])
    with pytest.raises(GuardError, match=re.escape(f"{source}:6: ") + ".*" + re.escape(message)):
        _ingest(source, RULE, seed=0)


@pytest.mark.parametrize(
    "depth", [100, 600, 990]
)  # how deep is too deep to write differs between Pythons
def test_a_nested_row_is_taken_or_named_and_never_ends_in_a_traceback(
    tmp_path: Path, depth: int
) -> None:
    source = _jsonl(
        tmp_path,
        [
            *_rows(),
            '{"text": "a", "label": 1, "meta": ' + '{"a":' * depth + "1" + "}" * (depth + 1),
        ],
    )
    if depth == 100:
        assert len(_ingest(source, RULE, seed=0).examples) == 61
        return
    try:
        _ingest(source, RULE, seed=0)
    except GuardError as error:
        assert f"{source}:61: " in str(error) and "nested too deeply" in str(error)


def test_a_problem_of_many_rows_is_said_once_with_the_first_places(tmp_path: Path) -> None:
    source = _jsonl(tmp_path, [*_rows(3), *({"text": "a"} for _ in range(25))])
    with pytest.raises(GuardError) as caught:
        _ingest(source, RULE, seed=0)
    message = str(caught.value)
    assert "25 bad rows" in message and message.count("no label") == 1
    assert f"{source}:4: no label" in message
    assert f"(24 more like it: {source}:5, {source}:6, {source}:7, …)" in message


@pytest.mark.parametrize(
    "row",
    [
        lambda number: {"text": "a", "label": f"bad{number}"},
        lambda number: {"messages": [{"role": "bot", "content": f"'{number}"}], "label": 1},
        lambda number: '{"text": ' * (number + 1),
    ],
)
def test_what_is_quoted_of_a_row_makes_no_other_problem(tmp_path: Path, row: Any) -> None:
    with pytest.raises(GuardError, match=r"own.jsonl:1: .*\(29 more like it: .*own.jsonl:4, …\)"):
        _ingest(_jsonl(tmp_path, list(map(row, range(30)))), RULE, seed=0)


def test_of_many_kinds_of_problems_twenty_are_named(tmp_path: Path) -> None:
    words = [chr(97 + number) * 3 for number in range(25)]
    source = [SourceRow(f"row {word}", {}, f"the problem {word}") for word in words]
    with pytest.raises(GuardError) as caught:
        ingest(source, "rows", RULE, 0)
    assert "row ttt: the problem ttt\n  and 5 other problems" in str(caught.value)


@pytest.mark.parametrize("row", [{"text": None, "label": 1}, {"text": "", "label": 1}])
def test_a_text_that_is_null_or_empty_is_no_conversation(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    message = "conversation is empty|not null and not empty"
    with pytest.raises(GuardError, match=message):
        _ingest(_jsonl(tmp_path, [row]), RULE, seed=0)


@pytest.mark.parametrize("content", ["", "\n", "text,label\n"])
def test_a_file_without_rows_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "own.csv").write_text(content)
    with pytest.raises(GuardError, match="no rows: the source is empty, or has a header alone"):
        _ingest(str(tmp_path / "own.csv"), RULE, seed=0)


def test_bad_csv_rows_are_named_by_line_even_after_a_cell_with_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text('text,label\n"two\nlines",1\nfine,maybe\na,0,extra\n')
    with pytest.raises(
        GuardError,
        match=r"(?s)own.csv:4: unknown label 'maybe'.*own.csv:5: more cells than columns",
    ):
        _ingest(str(path), RULE, seed=0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows"),
        ([{**row, "id": "same"} for row in _rows(3)], "1 ids occur more than once (got same)"),
        (
            [*_rows(20), {"text": "a", "label": 1, "split": "test"}],
            "some rows have a split and some have none",
        ),
        (_rows(6, split="train"), "validation has no row with label 0"),
        ([*_rows(20)[:8]], "validation has 1 of 2 rows with label"),
        ([{"text": _text(n), "label": 0} for n in range(30)], "train has no row with label 1"),
    ],
)
def test_a_source_that_cannot_be_trained_on_is_refused(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(GuardError, match=re.escape(message)):
        _ingest(_jsonl(tmp_path, rows), RULE, seed=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [("data.parquet", "Known: .jsonl, .jsonl.gz, .csv"), ("missing.jsonl", "no such file")],
)
def test_an_unreadable_source_is_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(GuardError, match=re.escape(message)):
        _ingest(str(tmp_path / name), RULE, seed=0)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(GuardError, match="not a readable gzip file"):
        _ingest(str(tmp_path / "own.jsonl.gz"), RULE, seed=0)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("text,label\nfine one,1\n\n\nother,maybe\n", 5),
        ("\n\ntext,label\nfine one,1\nother,maybe\n", 5),
        ('text,label\n"two\nlines",1\n\n"two\nmore",maybe\n', 5),
        ("text,label\r\nfine one,1\r\n\r\nother,maybe\r\n", 4),
    ],
)
def test_a_bad_csv_row_is_named_by_its_own_line_after_blank_lines(
    tmp_path: Path, text: str, line: int
) -> None:
    (tmp_path / "own.csv").write_bytes(text.encode())
    with pytest.raises(GuardError, match=rf"1 bad rows:\n.*own.csv:{line}: unknown label 'maybe'"):
        _ingest(str(tmp_path / "own.csv"), RULE, seed=0)


def test_a_csv_cell_may_be_long(tmp_path: Path) -> None:
    rows = [*_rows(), {"text": "long " * 40_000, "label": 1}]
    assert (
        max(
            len(e.messages[0].content) for e in _ingest(_csv(tmp_path, rows), RULE, seed=0).examples
        )
        == 200_000
    )


def test_a_quote_that_is_never_closed_is_named_by_the_line_it_stands_on(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text('text,label\nfine,1\n"open,1\nmore,0\n')
    with pytest.raises(GuardError, match=r"own.csv:3: not valid CSV .*check the quotes"):
        _ingest(str(tmp_path / "own.csv"), RULE, seed=0)


@pytest.mark.parametrize("splits", [("train", "train"), ("train", "test")])
def test_the_same_conversation_with_both_labels_is_a_bad_row_that_names_both_lines(
    tmp_path: Path, splits: tuple[str, str]
) -> None:
    rows = _rows(60)
    for number, row in enumerate(rows):
        row["split"] = SPLITS[number // 20]
    rows[2] |= {"text": "the same", "label": 0, "split": splits[0]}
    rows[50] |= {"text": "the same", "label": 1, "split": splits[1]}
    for splitting in ("keep", "clean", "new"):
        with pytest.raises(
            GuardError,
            match=r"own.jsonl:51: label 1, but the same conversation has label 0 in "
            r".*own.jsonl:3\. Correct",
        ):
            _ingest(_jsonl(tmp_path, rows), RULE, seed=0, splitting=splitting)


def test_the_same_words_of_another_speaker_are_another_conversation(tmp_path: Path) -> None:
    twins = [
        {"messages": [{"role": role, "content": "take two"}], "label": label}
        for role, label in (("user", 0), ("assistant", 1))
    ]
    assert len(_ingest(_jsonl(tmp_path, [*_rows(), *twins]), RULE, seed=0).examples) == 62


def test_other_fields_are_left_out(tmp_path: Path) -> None:
    rows = [{**row, "message": "a note", "rules": ["x"], "texts": 2} for row in _rows()]
    assert len(_ingest(_jsonl(tmp_path, rows), RULE, seed=0).examples) == len(rows)


@pytest.mark.parametrize("name", ["Split", "groups", "GROUP", "ids"])
def test_a_misspelt_field_is_no_field_that_is_left_out(tmp_path: Path, name: str) -> None:
    known = {"ids": "id"}.get(name, name.lower().removesuffix("s"))
    rows = [{**row, name: "x"} for row in _rows()]
    with pytest.raises(GuardError, match=f"own.jsonl:1: unknown field '{name}': write '{known}'"):
        _ingest(_jsonl(tmp_path, rows), RULE, seed=0)
    both = [{**row, name: "x", known: f"x{number}"} for number, row in enumerate(_rows())]
    if known != "split":
        assert len(_ingest(_jsonl(tmp_path, both), RULE, seed=0).examples) == len(both)


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("text,label, label\na,1,0\n", encoding="utf-8")
    with pytest.raises(GuardError, match=r"columns of one name.*label"):
        _ingest(str(path), RULE, seed=0)


@pytest.mark.parametrize("empty", [{"meta": {"group": ""}}, {"group": " "}, {"group": ""}])
def test_a_group_that_says_nothing_is_none(tmp_path: Path, empty: dict[str, Any]) -> None:
    examples = _ingest(_jsonl(tmp_path, _rows(**empty)), RULE, seed=0).examples
    assert len({example.group for example in examples}) == len(examples)
    zero = _ingest(_jsonl(tmp_path, [*_rows(), {**_rows()[0], "text": "z", "group": 0}]), RULE, 0)
    assert zero.examples[-1].group == "0"
