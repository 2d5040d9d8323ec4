"""What a command serves: which rules, on which of the named bases, by which method."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from guard.errors import GuardError
from guard.layout import Runs
from guard.recipe import MethodSettings, Recipe
from guard.weights.card import read_card
from serve.engine import Refusal
from serve.registry.rollout import Rollout
from serve.selection import (
    RegisteredRollouts,
    Selection,
    ServedPart,
    left_out,
    served_method,
    served_parts,
    start_engines,
    warm_up,
)
from tests.serve.cards import recipe, save_card, save_trained


def with_methods(*names: str) -> Recipe:
    return recipe().model_copy(update={"methods": {name: MethodSettings() for name in names}})


def test_the_first_adapter_that_shares_conversations_is_served_else_the_first_method() -> None:
    for listed, served in (
        (("lora", "alora", "head"), "alora"),
        (("head", "alora"), "alora"),
        (("head", "lora"), "head"),
        (("lora",), "lora"),
    ):
        assert served_method(with_methods(*listed), None) == served
    assert served_method(with_methods("lora", "alora"), "lora") == "lora"
    for name, problem in (
        ("alorra", "Did you mean 'alora'"),
        ("head", r"recipe tiny: methods.*lists no such method \(got head\)"),
    ):
        with pytest.raises(GuardError, match=problem):
            served_method(with_methods("lora"), name)


def test_a_server_whose_rules_cannot_answer_does_not_start(trained_on_both: Path) -> None:
    refused = {"own": Refusal("verdict", "the logit is nan", "nan")}
    cards = {"own": read_card(trained_on_both / "tiny/own/alora")}
    engine = SimpleNamespace(check=lambda _: SimpleNamespace(refused=refused), rules=cards)
    with pytest.raises(GuardError, match=r"own: the logit is nan.*make train RULE=own MODEL=tiny"):
        warm_up(engine)  # type: ignore[arg-type]


def selected(runs: Path, models: str, rules: str | None = None, **others: Any) -> Selection:
    return Selection(models, rules, runs=Runs(runs), **others)


def test_a_rule_is_answered_by_the_first_named_base_that_has_it(trained_on_both: Path) -> None:
    parts = served_parts(selected(trained_on_both, "tiny,minilm"))
    assert [(part.recipe.name, part.method, sorted(part.folders)) for part in parts] == [
        ("tiny", "alora", ["own", "shared"]),
        ("minilm", "lora", ["read"]),
    ]
    swapped = served_parts(selected(trained_on_both, "minilm,tiny"))
    assert [sorted(part.folders) for part in swapped] == [["read", "shared"], ["own"]]


def test_rules_that_are_trained_by_other_methods_alone_are_told(trained_on_both: Path) -> None:
    weights = ("tiny/own/lora", "tiny/other/lora", "tiny/other/lora-seed1", "minilm/read/head")
    for path in weights:
        save_trained(trained_on_both / path)
    selection = selected(trained_on_both, "tiny")
    told = "left out, as they have no weights of the served method: other (lora on tiny)"
    assert left_out(selection, served_parts(selection)) == told
    both = selected(trained_on_both, "tiny,minilm", method="lora")
    assert left_out(both, served_parts(both)) is None  # a LoRA has all of them
    named = selected(trained_on_both, "tiny", "own")
    assert left_out(named, served_parts(named)) is None
    of_heads = selected(trained_on_both, "minilm", method="head")
    line = left_out(of_heads, served_parts(of_heads))
    assert line is not None and line.endswith(": shared (lora on minilm)")
    with pytest.raises(GuardError, match=r"by method 'head'.*has weights: alora, lora"):
        served_parts(selected(trained_on_both, "tiny", method="head"))


def test_of_several_bases_only_the_named_rules_are_served(trained_on_both: Path) -> None:
    for models, rules in (("tiny,minilm", "read,own"), ("tiny, minilm", "read, own")):
        parts = served_parts(selected(trained_on_both, models, rules))
        assert [sorted(part.folders) for part in parts] == [["own"], ["read"]]
    assert len(served_parts(selected(trained_on_both, "tiny,minilm", "read"))) == 1
    for models, rules, problem in (
        ("tiny,minilm", "read,nobody", r"not trained \(got nobody\)"),
        ("tiny,minilm", ",", "no rule was named"),
        ("tiny", ",", "no rule was named"),
        (" ", None, "no model was named"),
    ):
        with pytest.raises(GuardError, match=problem):
            served_parts(selected(trained_on_both, models, rules))
    with pytest.raises(GuardError, match="a merged base answers alone"):
        served_parts(selected(trained_on_both, "tiny,minilm", is_merged=True))


def test_a_broken_rule_hinders_no_other_and_weights_of_another_are_not_served(
    trained_on_both: Path,
) -> None:
    (trained_on_both / "tiny/shared/alora/card.json").write_text("{}")
    (part,) = served_parts(selected(trained_on_both, "tiny,minilm", "own"))
    assert list(part.folders) == ["own"]
    for rules in ("own,shared", None):
        with pytest.raises(GuardError, match=r"shared.*card\.json"):
            served_parts(selected(trained_on_both, "tiny,minilm", rules))
    (trained_on_both / "tiny/own").rename(trained_on_both / "tiny/copied")
    with pytest.raises(GuardError, match=r"not of the rule 'copied'.*own"):
        served_parts(selected(trained_on_both, "tiny", "copied"))


def test_a_composed_rule_whose_parent_was_trained_again_is_refused(trained_on_both: Path) -> None:
    """Where its parents are not there it is served as it is."""
    folder = trained_on_both / "tiny/shared/alora"
    parent = read_card(folder.parents[1] / "own/alora")
    of_own = {"composed_of": {"own": parent.version, "elsewhere": "1" * 64}}
    read_card(folder).model_copy(update=of_own).save(folder)
    selection = selected(trained_on_both, "tiny", "shared")
    assert list(served_parts(selection)[0].folders) == ["shared"]
    parent.model_copy(update={"threshold": 0.5}).save(folder.parents[1] / "own/alora")
    stale = r"(?s)shared/alora: composed of another version of own .*make train RULE=shared"
    with pytest.raises(GuardError, match=stale):
        served_parts(selection)
    assert list(served_parts(selected(trained_on_both, "tiny", "own"))[0].folders) == ["own"]


def test_a_rule_that_is_trained_later_is_found_and_no_other_path(
    trained_on_both: Path, caplog: pytest.LogCaptureFixture
) -> None:
    selection = selected(trained_on_both, "tiny,minilm", "own")
    parts = served_parts(selection)
    merged = selected(trained_on_both, "tiny", "own", is_merged=True)
    for name in ("shared", "nobody"):
        assert RegisteredRollouts(merged, parts).find(name) is None
        assert f"{name!r}: a merged base has what it began with" in caplog.messages[-1]
    caplog.clear()
    find = RegisteredRollouts(selection, parts).find
    assert find("shared") == Rollout(folder=trained_on_both / "tiny/shared/alora")
    assert not caplog.records
    assert find("read") is None  # on a base that is not served
    (record,) = caplog.records
    assert "'read'" in record.getMessage() and "Trained: own, shared" in record.getMessage()
    for name in ("..", "../minilm/read", "", "nobody", "own,shared"):
        assert find(name) is None
    assert caplog.messages[-1] == "no weights of the rule 'own,shared': no rule has this name"
    # A link that leads elsewhere is not found, and hides none.
    shutil.move(trained_on_both / "tiny/own", trained_on_both / "elsewhere")
    (trained_on_both / "tiny/own").symlink_to(trained_on_both / "elsewhere")
    assert find("own") is None
    assert find("shared") == Rollout(folder=trained_on_both / "tiny/shared/alora")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The recipe and the rules of each engine that would be started."""
    started: list[tuple[str, list[str]]] = []

    def engine(part_recipe: Recipe, folders: Any, reader: Path | None) -> Any:
        started.append((part_recipe.name, sorted(folders)))
        return SimpleNamespace(close=lambda: None, rules=dict.fromkeys(folders))

    monkeypatch.setattr("serve.selection.GuardEngine", engine)
    return started


def test_of_two_recipes_of_one_base_the_one_of_the_card_answers_again(
    trained_on_both: Path, started: list[tuple[str, list[str]]]
) -> None:
    folders = {name: trained_on_both / f"tiny/{name}/alora" for name in ("own", "shared")}
    save_card(folders["shared"], "shared", model="longer")
    recipes = [recipe(), recipe().model_copy(update={"name": "longer"})]
    start_engines([ServedPart(each, "alora", {}) for each in recipes], folders)
    assert started == [("tiny", ["own"]), ("longer", ["shared"])]


def test_an_engine_is_started_again_with_the_rules_that_were_served_last(
    trained_on_both: Path, started: list[tuple[str, list[str]]]
) -> None:
    parts = served_parts(selected(trained_on_both, "tiny,minilm"))
    start_engines(parts)
    own, read = trained_on_both / "tiny/own/alora", trained_on_both / "minilm/read/lora"
    minilm = parts[1].recipe
    bases = {"base": minilm.base, "base_revision": minilm.base_revision}
    save_card(read, "read", "lora", model="minilm", **bases)
    new = trained_on_both / "new"
    shutil.copytree(own, new)
    save_card(new, "new", model="another recipe of this base")
    start_engines(parts, {"own": own, "new": new, "read": read})
    start_engines(parts, {"read": read})
    with pytest.raises(GuardError, match="not of the rule 'read'"):
        start_engines(parts, {"read": own})
    with pytest.raises(GuardError, match=r"weights is not served.*Served here: minilm"):
        start_engines(parts[1:], {"read": read, "own": own})
    assert started == [
        ("tiny", ["own", "shared"]),
        ("minilm", ["read"]),
        ("tiny", ["new", "own"]),
        ("minilm", ["read"]),
        ("minilm", ["read"]),
    ]
