"""The registry's commands: what they print, and that a server serves what they decided."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.layout import Runs
from guard.rule import load_rule
from guard.twins import TwinRate
from guard.weights.card import TWINS, read_card
from guard.weights.version_zero import card_of_reader
from serve.registry.change import RolloutChange
from serve.registry.registry import RegisteredRule, Registry
from serve.selection import RegisteredRollouts, Selection, registered, served_parts, unpublished
from serve.versions import main
from tests.serve.guarded import save_adapter


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def train(runs: Runs, seed: int, rule: str = "mild") -> str:
    """Weights in the rule's folder, registered as training does; their version."""
    folder = save_adapter(runs.adapter("tiny", rule, "alora"), rule, seed=seed)
    return Registry(runs).register(folder, actor="ann", note=f"seed {seed}").id


def command(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    """What the command prints, on either stream."""
    monkeypatch.setattr(sys, "argv", ["versions", "--runs", str(runs.root), *words])
    try:
        main()
    except SystemExit as stop:
        assert stop.code == 2
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_what_a_person_decides_is_served_and_listed(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = train(runs, 1), train(runs, 2)
    registry, selection = Registry(runs), Selection(runs=runs)
    parts = served_parts(selection)
    source = RegisteredRollouts(selection, parts)

    def found() -> Path:
        rollout = source.find("mild")
        assert rollout is not None
        return rollout.folder

    assert parts[0].folders == {"mild": registry.folder(first)} == {"mild": found()}
    (line,) = unpublished(selection, parts)
    assert second[:12] in line and "make publish RULE=mild" in line
    words = ("publish", "--rule", "mild", "--why", "fewer false alarms")
    assert f"mild: the champion is {second[:12]}" in command(runs, monkeypatch, capsys, *words)
    assert found() == registry.folder(second) and not unpublished(selection, parts)
    words = ("rollback", "--rule", "mild", "--version", first[:5], "--why", "it flags greetings")
    command(runs, monkeypatch, capsys, *words)
    assert found() == registry.folder(first)
    listed = command(runs, monkeypatch, capsys, "list", "--files")
    assert f"{first[:12]}  champion" in listed and f"{second[:12]}  previous" in listed
    assert str(registry.folder(second)) in listed and "5 events" in listed
    assert registry.events()[-1].reason == "it flags greetings"
    told = command(runs, monkeypatch, capsys, "list", "--rules", "mild")
    assert f"rolled_back {first[:12]}, it flags greetings" in told
    # What was taken back is published again by nobody who does not name it.
    words = ("rollback", "--rule", "mild", "--why", "again")
    assert "was rolled back already" in command(runs, monkeypatch, capsys, *words)
    words = ("publish", "--rule", "mild", "--why", "again")
    assert "has no candidate" in command(runs, monkeypatch, capsys, *words)


def test_a_mode_is_set_by_alias_or_id_and_listed(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = train(runs, 1, "pii_leak"), train(runs, 2, "pii_leak")

    def mode(mode: str, *words: str) -> str:
        rule = ("mode", "--rule", "pii_leak", "--mode", mode, "--why", "look first")
        return command(runs, monkeypatch, capsys, *rule, *words)

    assert f"{second[:12]} is canary:5%" in mode("canary:5%")
    assert f"{first[:12]} is shadow" in mode("shadow", "--version", "champion")
    listed = command(runs, monkeypatch, capsys, "list")
    for version, is_mode in ((first, "shadow, seed 1"), (second, "canary:5%, seed 2")):
        assert [line for line in listed.splitlines() if version[:12] in line and is_mode in line]
    assert "no mode (got 'on')" in mode("on")
    words = ("publish", "--rule", "pii_leak", "--why", "better")
    assert ", shadow, as before" in command(runs, monkeypatch, capsys, *words)


def test_what_was_put_in_the_folder_is_published_too(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Say because it was trained on another machine."""
    train(runs, 1)
    save_adapter(runs.adapter("tiny", "mild", "alora"), "mild", seed=5)
    words = ("publish", "--rule", "mild", "--why", "trained on the GPU")
    command(runs, monkeypatch, capsys, *words)
    versions = Registry(runs).versions(Registry(runs).rules()[0])
    assert Registry(runs).champions("tiny", "alora")["mild"] == versions[1].folder
    assert "has no candidate" in command(runs, monkeypatch, capsys, *words)


def test_weights_that_no_server_takes_are_not_published(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(runs, 1)
    folder = runs.adapter("tiny", "mild", "alora")
    read_card(folder).model_copy(update={"rule_hash": "of other words"}).save(folder)
    printed = command(runs, monkeypatch, capsys, "publish", "--rule", "mild", "--why", "x")
    assert "rule text is not the one its hash names" in printed
    save_adapter(folder, "stern", seed=3)  # another rule's
    printed = command(runs, monkeypatch, capsys, "publish", "--rule", "mild", "--why", "x")
    assert "not of the rule 'mild'" in printed
    assert Registry(runs).champions("tiny", "alora")["mild"] == Registry(runs).folder(first)


def test_a_running_server_decides_as_the_command_does(runs: Runs) -> None:
    first, second = train(runs, 1), train(runs, 2)
    registry, selection = Registry(runs), Selection(runs=runs)
    source = RegisteredRollouts(selection, served_parts(selection))
    card = read_card(registry.folder(first))
    change = RolloutChange(action="publish", actor="ann", reason="better")
    assert source.prepare(card, change).carry_out() == 1
    newest, before = source.history(card).versions
    assert (newest.version, newest.aliases, newest.mode) == (second, ("champion",), "enforce")
    assert (before.version, before.aliases, before.mode) == (first, ("previous",), None)
    assert newest.threshold == card.threshold
    weights = registry.folder(first) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"half a file")
    back = change.model_copy(update={"action": "rollback"})
    with pytest.raises(GuardError, match="adapter_model"):
        source.prepare(card, back)
    merged = RegisteredRollouts(Selection(runs=runs, is_merged=True), [])
    with pytest.raises(GuardError, match="merged"):
        merged.prepare(card, change)


def test_all_candidates_are_published_at_once(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after an update of this program, behind which every rule is trained again."""
    for rule in ("mild", "stern"):
        train(runs, 1, rule)
    newest = train(runs, 2, "stern")
    printed = command(runs, monkeypatch, capsys, "publish", "--rule", "all", "--why", "an update")
    assert f"stern: the champion is {newest[:12]}" in printed and "mild" not in printed
    printed = command(runs, monkeypatch, capsys, "publish", "--rule", "all", "--why", "again")
    assert "no rule has a candidate" in printed
    printed = command(runs, monkeypatch, capsys, "rollback", "--rule", "all", "--why", "slow")
    assert "stern: the champion" in printed and newest[:12] not in printed


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("list",), "no versions"),
        (("publish", "--rule", "nobody", "--why", "x"), "no version of tiny/nobody/alora"),
        (("rollback", "--why", "x"), "which rule?"),
        (("publish", "--rule", "mild", "--why", "x", "--method", "lora", "--model", "x"), "x"),
    ],
)
def test_wrong_words_are_an_error_in_a_line(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    problem: str,
) -> None:
    printed = command(runs, monkeypatch, capsys, *words)
    assert problem in printed and printed.count("\n") == 1 and printed.startswith("error: ")
    assert not Registry(runs).file.exists()


def test_rules_without_versions_are_served_from_their_folders(runs: Runs) -> None:
    """Weights of before there was a registry, or copied there."""
    folder = save_adapter(runs.adapter("tiny", "mild", "alora"), "mild", seed=1)
    selection = Selection(runs=runs)
    parts = served_parts(selection)
    assert parts[0].folders == {"mild": folder} and unpublished(selection, parts) == []
    assert not Registry(runs).root.exists()


def test_a_server_makes_versions_of_what_it_finds(runs: Runs) -> None:
    """So that nothing that it reads is trained over; but where nothing can be written."""
    folder = save_adapter(runs.adapter("tiny", "mild", "alora"), "mild", seed=1)
    selection = Selection(runs=runs)
    (part,) = registered(selection, served_parts(selection))
    assert part.folders == Registry(runs).champions("tiny", "alora")
    shutil.rmtree(Registry(runs).root)
    Registry(runs).root.write_text("no folder can be made here")
    (part,) = registered(selection, served_parts(selection))
    assert part.folders == {"mild": folder}


def test_a_version_that_flags_too_many_twins_is_published_by_force_alone(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("publish", "--rule", "pii_leak", "--why", "finds more")
    rule = load_rule("pii_leak")
    monkeypatch.setattr("serve.registry.change.load_rule", lambda name: rule)
    train(runs, 1, "pii_leak")
    folder = runs.adapter("tiny", "pii_leak", "alora")
    rate = TwinRate(n=180, fpr=0.15, fpr_ci95=(0.105, 0.21))
    measured = {"test": {TWINS: rate.model_dump(mode="json")}}
    read_card(folder).model_copy(update={"metrics": measured}).save(folder)
    version = Registry(runs).register(folder, actor="ann", note="flags more").id
    assert "0.150 [0.105, 0.210]" in command(runs, monkeypatch, capsys, "list")
    rule = rule.model_copy(update={"max_fpr_twins": 0.1})
    told = command(runs, monkeypatch, capsys, *words)
    assert f"{version[:12]}: 0.150 [0.105, 0.210] of 180, max_fpr_twins 0.1" in told
    assert "FORCE=1" in told and "candidate" in command(runs, monkeypatch, capsys, "list")
    assert f"champion is {version[:12]}" in command(runs, monkeypatch, capsys, *words, "--force")
    command(runs, monkeypatch, capsys, "rollback", "--rule", "pii_leak", "--why", "wait")
    rule = rule.model_copy(update={"max_fpr_twins": 0.106})  # the interval holds it
    told = command(runs, monkeypatch, capsys, *words, "--version", version)
    assert f"champion is {version[:12]}" in told


def test_what_is_worse_than_the_reader_is_published_by_force_alone(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registry, rule = Registry(runs), RegisteredRule("tiny", "mild", "alora")
    reader = save_adapter(runs.root / "reader", "mild", seed=0)
    zero = card_of_reader(read_card(reader), "mild", "Be mild. Be nice.")
    registry.register_zero(zero, reader, actor="ann", note="the reader")
    folder = save_adapter(runs.adapter("tiny", "mild", "alora"), "mild", seed=1)
    compared = {"loss_above_reader": 0.2, "loss_above_reader_ci95": [0.1, 0.3]}
    card = read_card(folder).model_copy(update={"metrics": {"day_zero": compared}})
    card.save(folder)
    registry.register(folder, actor="ann", note="trained")
    assert registry.aliases(rule) == {"champion": zero.version, "candidate": card.version}
    words = ("publish", "--rule", "mild", "--why", "try it")
    refused = command(runs, monkeypatch, capsys, *words)
    assert "worse than the reader" in refused and "+0.200 nats [+0.100, +0.300]" in refused
    assert "FORCE=1" in refused and registry.aliases(rule)["champion"] == zero.version
    forced = command(runs, monkeypatch, capsys, *words, "--force")
    assert f"champion is {card.version[:12]}" in forced
