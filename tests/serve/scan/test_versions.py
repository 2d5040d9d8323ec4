"""Which folders are two versions of one rule, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from guard.errors import GuardError
from guard.rule import text_hash
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
