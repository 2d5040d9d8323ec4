"""The server's command: which rules it serves, and what it refuses before anything is loaded."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from guard.errors import GuardError
from guard.recipe import MethodSettings, Recipe
from serve.engine import Refusal
from serve.policy.rule_set import RuleSet
from serve.up import _listening, _parts, _rule_sets, _tenants, _warm_up, main, served_method
from tests.serve.guarded import recipe


def with_methods(*names: str) -> Recipe:
    return recipe().model_copy(update={"methods": {name: MethodSettings() for name in names}})


@pytest.mark.parametrize(
    ("listed", "served"),
    [
        (("lora", "alora", "head"), "alora"),
        (("head", "alora"), "alora"),
        (("head", "lora"), "head"),
        (("lora",), "lora"),
    ],
)
def test_the_first_adapter_that_shares_conversations_is_served_else_the_first_method(
    listed: tuple[str, ...], served: str
) -> None:
    assert served_method(with_methods(*listed), None) == served


def test_a_method_is_served_by_name_and_an_unknown_one_is_refused() -> None:
    assert served_method(with_methods("lora", "alora"), "lora") == "lora"
    with pytest.raises(GuardError, match="Did you mean 'alora'"):
        served_method(with_methods("lora"), "alorra")
    with pytest.raises(
        GuardError, match=r"recipe tiny: methods.*lists no such method \(got head\)"
    ):
        served_method(with_methods("lora"), "head")


def test_a_server_whose_rules_cannot_answer_does_not_start() -> None:
    refused = {"fine": Refusal("verdict", "the logit is nan")}
    engine = SimpleNamespace(check=lambda _: SimpleNamespace(refused=refused))
    with pytest.raises(GuardError, match=r"fine: the logit is nan.*make train RULE=fine"):
        _warm_up(engine)  # type: ignore[arg-type]


def test_a_port_in_use_is_found_before_the_engine_starts() -> None:
    with _listening("127.0.0.1", 0) as taken, pytest.raises(GuardError, match="PORT="):
        _listening("127.0.0.1", taken.getsockname()[1])


def test_without_trained_rules_the_command_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["up", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "make train" in capsys.readouterr().err


def test_an_unknown_method_ends_the_command_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["up", "--runs", str(tmp_path), "--method", "lorra"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "Did you mean 'lora'" in capsys.readouterr().err


def test_a_merged_base_has_its_method_already(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["up", "--merged", "--method", "alora"])
    with pytest.raises(SystemExit):
        main()
    assert "leave out --method" in capsys.readouterr().err


def arguments(runs: Path, model: str, rules: str | None = None, **others: object) -> Namespace:
    fields: dict[str, object] = {"method": None, "merged": False}
    return Namespace(model=model, rules=rules, runs=runs, **fields | others)


@pytest.fixture
def trained_on_both(tmp_path: Path) -> Path:
    """`shared` is trained on both bases, each of the others on one."""
    for folder in ("tiny/shared/alora", "tiny/own/alora", "minilm/shared/lora", "minilm/read/lora"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "card.json").touch()
    return tmp_path


def test_a_rule_is_answered_by_the_first_of_the_named_bases_that_has_it(
    trained_on_both: Path,
) -> None:
    parts = _parts(arguments(trained_on_both, "tiny,minilm"))
    assert [(part.recipe.name, part.method, sorted(part.folders)) for part in parts] == [
        ("tiny", "alora", ["own", "shared"]),
        ("minilm", "lora", ["read"]),
    ]
    swapped = _parts(arguments(trained_on_both, "minilm,tiny"))
    assert [sorted(part.folders) for part in swapped] == [["read", "shared"], ["own"]]


def test_of_several_bases_only_the_named_rules_are_served(trained_on_both: Path) -> None:
    parts = _parts(arguments(trained_on_both, "tiny,minilm", "read,own"))
    assert [sorted(part.folders) for part in parts] == [["own"], ["read"]]
    assert len(_parts(arguments(trained_on_both, "tiny,minilm", "read"))) == 1
    with pytest.raises(GuardError, match=r"not trained \(got nobody\)"):
        _parts(arguments(trained_on_both, "tiny,minilm", "read,nobody"))


def test_a_merged_base_is_served_alone(trained_on_both: Path) -> None:
    with pytest.raises(GuardError, match="a merged base answers alone"):
        _parts(arguments(trained_on_both, "tiny,minilm", merged=True))


def test_rule_sets_are_read_before_an_engine_starts_and_name_only_served_rules(
    trained_on_both: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = trained_on_both / "sets.yaml"
    file.write_text("rule_sets: {support: {rules: [shared, read]}}")
    parts = _parts(arguments(trained_on_both, "tiny,minilm"))
    assert list(_rule_sets(file, parts)) == ["support"]
    assert _rule_sets(None, parts) == {}
    monkeypatch.setattr("serve.up._start_engine", lambda *_, **__: pytest.fail("it starts"))
    command = ["up", "--runs", str(trained_on_both), "--rule-sets", str(file), "--port", "0"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert "support.rules: the rule is not served (got read)" in capsys.readouterr().err


def test_tenants_need_the_rule_sets_that_they_may_ask(tmp_path: Path) -> None:
    rule_sets = {"support": RuleSet.any_of(["shared"])}
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants: {{shop: {{keys_sha256: ['{'0' * 64}'], rule_sets: [support]}}}}")
    tenants = _tenants(file, rule_sets)
    assert tenants is not None and [tenant.name for tenant in tenants.all] == ["shop"]
    assert _tenants(None, rule_sets) is None
    with pytest.raises(GuardError, match=r"there are none.*RULESETS="):
        _tenants(file, {})
