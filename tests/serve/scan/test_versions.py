"""Which folders are two versions of one rule, and how often their verdicts flip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guard.errors import GuardError
from guard.rule import text_hash
from serve.scan.flips import CountedShare, ReplayTally
from serve.scan.versions import find_versions
from tests.serve.cards import save_card, text_of


def weights(folder: Path, rule: str, content: str, method: str = "alora", **card: Any) -> Path:
    """A folder with a card whose weights nothing loads."""
    folder.mkdir(parents=True)
    name = "head.safetensors" if method == "head" else "adapter_model.safetensors"
    (folder / name).write_text(content)
    save_card(folder, rule, method, **card)
    return folder


def test_folders_of_rules_give_a_pair_for_every_rule_that_differs(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for side in (a, b):
        weights(side / "mild" / "alora", "mild", side.name)
        weights(side / "mild" / "head", "mild", side.name, "head")
        weights(side / "mild" / "before" / "alora", "mild", f"older {side.name}")
        weights(side / "stern" / "lora", "stern", side.name, "lora")
        weights(side / "same" / "alora", "same", "same")
    weights(a / "old" / "alora", "old", "x")
    weights(b / "new" / "alora", "new", "x")
    versions = find_versions(a, b)
    mild, stern = versions.pairs
    assert (mild.a.name, mild.b.name, mild.rule) == ("mild@A", "mild@B", "mild")
    assert (mild.a.folder, mild.b.folder) == (a / "mild" / "alora", b / "mild" / "alora")
    assert mild.shares_prefill and mild.differences == []
    assert (stern.rule, stern.a.card.method, stern.shares_prefill) == ("stern", "lora", False)
    assert (versions.only_a, versions.only_b) == (("old",), ("new",))
    assert versions.unchanged == ("same",)
    with pytest.raises(GuardError, match="no method in common for same"):
        find_versions(a, b, "head")
    with pytest.raises(GuardError, match="the same weights"):
        find_versions(a, a)


def test_what_differs_beside_the_weights_is_said(tmp_path: Path) -> None:
    text = "The assistant must not be wild."
    a = weights(tmp_path / "a", "mild", "same")
    changed = {"rule_text": text, "rule_hash": text_hash(text), "data_hash": "more"}
    b = weights(tmp_path / "b", "mild", "same", threshold=0.5, reads="user", **changed)
    (pair,) = find_versions(a, b).pairs
    said = " ".join(pair.differences)
    assert text in said and text_of("mild") in said
    assert "only the card" in said and "A has “0.25”, B has “0.5”" in said
    assert "What counts differs: A has “conversation”, B has “user”." in said
    assert "different data" in said


@pytest.mark.parametrize(
    ("rule", "content", "changed", "problem"),
    [
        ("stern", "after", {}, "answer different rules"),
        ("mild", "after", {"base": "another"}, "on different bases"),
        ("mild", "after", {"base_revision": "newer"}, "on different bases"),
    ],
)
def test_what_cannot_stand_side_by_side_is_refused(
    tmp_path: Path, rule: str, content: str, changed: dict[str, Any], problem: str
) -> None:
    a = weights(tmp_path / "a", "mild", "before")
    b = weights(tmp_path / "b", rule, content, **changed)
    with pytest.raises(GuardError, match=problem):
        find_versions(a, b)


def test_what_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    a = weights(tmp_path / "a" / "mild" / "alora", "mild", "before")
    empty = tmp_path / "empty"
    empty.mkdir()
    other = weights(tmp_path / "other" / "stern" / "alora", "stern", "x").parent.parent
    wrong = {
        "no such folder": (a, tmp_path / "nowhere"),
        "one is a folder of weights, the other a folder of rules": (a, tmp_path / "a"),
        "and none in RULE/METHOD": (tmp_path / "a", empty),
        "no rule in common": (tmp_path / "a", other),
    }
    for problem, (first, second) in wrong.items():
        with pytest.raises(GuardError, match=problem):
            find_versions(first, second)


Pair = tuple[float | None, float | None]


def row(number: int, p: float | None, *, confident: bool = True) -> dict[str, Any]:
    place = {"source": "a.jsonl", "row": number, "id": f"c{number}", "p_violation": p}
    if p is None:
        return {**place, "verdict": "unjudged", "confident": None, "reason": "it does not fit"}
    verdict = "violation" if p >= 0.5 else "allow"
    return {**place, "verdict": verdict, "confident": confident, "reason": ""}


def tallied(pairs: list[Pair], shown: int = 50) -> ReplayTally:
    tally = ReplayTally(shown)
    for number, (a, b) in enumerate(pairs):
        tally.add(row(number, a), row(number, b))
    return tally


def test_each_direction_and_each_side_is_counted() -> None:
    pairs: list[Pair] = [(0.1, 0.2), (0.1, 0.9), (0.4, 0.6), (0.7, 0.3), (0.8, 0.9)]
    pairs += [(None, 0.9), (0.1, None), (None, None)]
    tally = tallied(pairs)
    facts = tally.facts()
    assert facts["judged"] == 5
    counts = {name: facts[name]["count"] for name in ("to_violation", "to_allow", "flips")}
    assert counts == {"to_violation": 2, "to_allow": 1, "flips": 3}
    assert (facts["flagged_a"]["count"], facts["flagged_b"]["count"]) == (2, 3)
    assert [facts[f"unjudged_{side}"] for side in ("a", "b", "a_and_b")] == [1, 1, 1]
    assert facts["reasons"] == {"it does not fit": 3}
    assert [flip["row"] for flip in facts["flipped"]] == [1, 3, 2]
    assert tally.largest()[1].change == pytest.approx(-0.4)
    assert list(facts["quantiles"].values())[::2] == pytest.approx([-0.4, 0.1, 0.8])
    assert facts["confident_flips"] == 3
    tally.add(row(9, 0.1), row(9, 0.6, confident=False))
    assert tally.facts()["confident_flips"] == 3, "either is in doubt"
    text = tallied(pairs).as_text()
    assert (text["judged by both"], text["unjudged by A only"]) == ("5", "1")
    assert text["verdicts that flip"].startswith("3 (60.00 %, 95 % interval ")
    assert "least -0.400" in text["p(B) - p(A)"] and "most +0.800" in text["p(B) - p(A)"]
    assert text["unjudged: it does not fit"] == "3"


def test_the_interval_is_exact_and_of_nothing_says_nothing() -> None:
    assert str(CountedShare.of(3, 2000)) == "3 (0.15 %, 95 % interval 0.03 to 0.44)"
    assert CountedShare.of(0, 0).ci95 == (0.0, 1.0)
    nothing = tallied([(None, None)])
    assert nothing.facts()["quantiles"] == {} and "p(B) - p(A)" not in nothing.as_text()


def test_the_list_is_bounded_and_keeps_the_largest() -> None:
    changes = np.random.default_rng(0).uniform(0.1, 0.5, 300)
    tally = tallied([(0.45, 0.45 + change) for change in changes], shown=7)
    expected = np.argsort(-changes)[:7].tolist()
    assert [flip.row for flip in tally.largest()] == expected
    assert tally.counts["flips"] == sum(changes >= 0.05) and len(tally.flips) <= 14
