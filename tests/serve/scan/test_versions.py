"""Which folders are two versions of one rule, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from guard.errors import GuardError
from guard.rule import text_hash
from serve.scan.versions import find_versions, replayed_parts
from tests.serve.cards import save_card, text_of
from tests.serve.guarded import save_adapter


def weights(folder: Path, rule: str, content: str, method: str = "alora", **card: Any) -> Path:
    """A folder with a card whose weights nothing loads."""
    folder.mkdir(parents=True)
    name = "head.safetensors" if method == "head" else "adapter_model.safetensors"
    (folder / name).write_text(content)
    save_card(folder, rule, method, **card)
    return folder


def test_two_folders_are_served_side_by_side_under_names_of_their_own(tmp_path: Path) -> None:
    a = weights(tmp_path / "a", "mild", "before")
    b = weights(tmp_path / "b", "mild", "after")
    (pair,) = find_versions(a, b).pairs
    assert (pair.a.name, pair.b.name, pair.rule) == ("mild@A", "mild@B", "mild")
    assert (pair.a.folder, pair.b.folder) == (a, b)
    assert pair.shares_prefill and pair.differences == []


def test_folders_of_rules_give_a_pair_for_every_rule_of_both(tmp_path: Path) -> None:
    for side in ("a", "b"):
        weights(tmp_path / side / "mild" / "alora", "mild", side)
        weights(tmp_path / side / "stern" / "lora", "stern", side, "lora")
        weights(tmp_path / side / "mild" / "before" / "alora", "mild", f"older {side}")
    weights(tmp_path / "a" / "mild" / "head", "mild", "a", "head")
    weights(tmp_path / "b" / "mild" / "head", "mild", "b", "head")
    weights(tmp_path / "a" / "old" / "alora", "old", "x")
    weights(tmp_path / "b" / "new" / "alora", "new", "x")
    versions = find_versions(tmp_path / "a", tmp_path / "b")
    assert [(pair.rule, pair.a.card.method) for pair in versions.pairs] == [
        ("mild", "alora"),
        ("stern", "lora"),
    ]
    assert (versions.only_a, versions.only_b) == (("old",), ("new",))
    mild, stern = versions.pairs
    assert mild.shares_prefill and not stern.shares_prefill
    with pytest.raises(GuardError, match="no method in common for stern"):
        find_versions(tmp_path / "a", tmp_path / "b", "head")


def test_a_rule_that_is_the_same_on_both_sides_is_named_and_keeps_no_other_from_being_replayed(
    tmp_path: Path,
) -> None:
    for side in ("a", "b"):
        weights(tmp_path / side / "mild" / "alora", "mild", side)
        weights(tmp_path / side / "stern" / "alora", "stern", "same")
    versions = find_versions(tmp_path / "a", tmp_path / "b")
    assert [pair.rule for pair in versions.pairs] == ["mild"]
    assert versions.unchanged == ("stern",)
    with pytest.raises(GuardError, match="the same weights"):
        find_versions(tmp_path / "a", tmp_path / "a")


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
        ("mild", "before", {}, "the same weights"),
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


@pytest.mark.slow
def test_both_folders_are_checked_as_the_engine_checks_them(tmp_path: Path) -> None:
    a = save_adapter(tmp_path / "a", "mild", seed=1)
    b = save_adapter(tmp_path / "b", "mild", seed=2)
    (part,) = replayed_parts(find_versions(a, b))
    assert (part.recipe.name, part.folders) == ("tiny", {"mild@A": a, "mild@B": b})
    save_card(b, "mild", prompt_hash="another")
    with pytest.raises(GuardError, match="another wording or layout of the prompt"):
        replayed_parts(find_versions(a, b))
