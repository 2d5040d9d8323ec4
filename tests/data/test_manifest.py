from typing import Any

from data.manifest import describe, load, save, table
from guard.conversation.example import Example, Message

ORIGIN = {"source": "generator", "seed": 0, "dropped": 0}


def _row(number: int, split: str, stratum: str, words: int) -> Example:
    messages = (Message("user", " ".join(["word"] * words)),)
    label, meta = number % 2, {"stratum": stratum}
    return Example(f"e{number}", "r", messages, label, split, "s", f"g{number}", meta)  # type: ignore[arg-type]


def test_rows_are_counted_by_split_and_stratum_in_the_splits_order(tmp_path: Any) -> None:
    places = [("test", "unseen")] * 4 + [("train", "seen")] * 3 + [("test", "seen")] * 2
    rows = [_row(number, *place, 5 + number) for number, place in enumerate(places)]
    save(tmp_path, ORIGIN | describe(rows))
    manifest = load(tmp_path)
    assert [tuple(row.values()) for row in manifest["counts"]] == [
        ("train", "seen", 3, 1),
        ("test", "seen", 2, 1),
        ("test", "unseen", 4, 2),
    ]
    shown = table("r", manifest).splitlines()
    assert shown[:3] == [
        "r: generator, seed 0",
        "  split       stratum    rows  violate",
        "  train       seen          3        1",
    ]
    assert "  words per conversation: 9 median if violating, 9 if not" in shown
    assert load(tmp_path / "none") == {}


def test_what_was_dropped_and_what_a_debate_took_is_told() -> None:
    manifest = ORIGIN | describe([_row(number, "test", "real", 3) for number in range(200)])
    told = table("r", manifest)
    assert "dropped" not in told and "answers" not in told and "few rows" not in told
    debate = {"calls": 1200, "malformed": 2, "cost_usd": 1.5, "outcomes": {"no consensus": 7}}
    told = table("r", manifest | {"dropped": 3, "debate": debate})
    assert "  3 rows dropped: their group or nearly their text is" in told
    assert "  1,200 answers, 2 not in form, 1.50 USD\n       7 no consensus" in told
