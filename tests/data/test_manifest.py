from pathlib import Path

from data.manifest import describe, load, save, table
from guard.conversation.example import Example, Message

ORIGIN = {"source": "generator", "seed": 0, "dropped": 0}


def _row(number: int, split: str, stratum: str, words: int) -> Example:
    messages = (Message("user", " ".join(["word"] * words)),)
    label, meta = number % 2, {"stratum": stratum}
    return Example(f"e{number}", "r", messages, label, split, "s", f"g{number}", meta)  # type: ignore[arg-type]


def test_rows_are_counted_by_split_and_stratum_and_what_a_debate_took_is_told(
    tmp_path: Path,
) -> None:
    places = [("test", "unseen")] * 4 + [("train", "seen")] * 3 + [("test", "seen")] * 2
    rows = [_row(number, *place, 5 + number) for number, place in enumerate(places)]
    save(tmp_path, ORIGIN | describe(rows))
    manifest = load(tmp_path)
    assert [tuple(row.values()) for row in manifest["counts"]] == [
        ("train", "seen", 3, 1),
        ("test", "seen", 2, 1),
        ("test", "unseen", 4, 2),
    ]
    told = table("r", manifest)
    assert told.splitlines()[:3] == [
        "r: generator, seed 0",
        "  split       stratum    rows  violate",
        "  train       seen          3        1",
    ]
    assert "  words per conversation: 9 median if violating, 9 if not" in told
    assert "dropped" not in told and "answers" not in told
    debate = {"calls": 1200, "malformed": 2, "cost_usd": 1.5, "outcomes": {"no consensus": 7}}
    told = table("r", manifest | {"debate": debate})
    assert "  1,200 answers, 2 not in form, 1.50 USD\n       7 no consensus" in told
    assert load(tmp_path / "none") == {}
