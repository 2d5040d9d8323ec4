"""Versions never change, aliases follow decisions, events hold, and nothing that goes wrong loses a
champion.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.layout import Runs
from guard.method import PEFT_WEIGHTS
from guard.rule import Gate
from guard.weights.card import load_card, read_card
from serve.registry.registry import RegisteredRule, Registry
from serve.registry.rollout import Mode
from tests.serve.cards import save_card

RULE = RegisteredRule("tiny", "mild", "alora")


def save_weights(folder: Path, content: bytes) -> Path:
    """A folder as training leaves it, with weights that no model can load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PEFT_WEIGHTS).write_bytes(content)
    save_card(folder, "mild", rule_text="Be nice.")
    return folder


def trained(runs: Runs, content: bytes = b"first") -> Path:
    return save_weights(runs.adapter("tiny", "mild", "alora"), content)


def registered(registry: Registry, *contents: bytes) -> list[str]:
    """The ids of versions that were trained one after the other."""
    ids = []
    for content in contents:
        folder = trained(Runs(registry.root.parent), content)
        ids.append(registry.register(folder, actor="ann", note="trained").id)
    return ids


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(Runs(tmp_path))


def test_training_overwrites_nothing_and_a_person_decides_what_is_served(
    registry: Registry,
) -> None:
    first, second, third = registered(registry, b"first", b"second", b"third")
    assert registry.aliases(RULE) == {"champion": first, "candidate": third}
    registry.publish(RULE, third, actor="ann", reason="fewer false alarms")
    assert registry.aliases(RULE) == {"champion": third, "previous": first}
    registry.publish(RULE, first, actor="bob", reason="it flags greetings", back=True)
    assert registry.aliases(RULE) == {"champion": first, "previous": third}
    registry.publish(RULE, second[:6], actor="ann", reason="between the two")
    assert registry.champions("tiny", "alora") == {"mild": registry.folder(second)}
    for version in registry.versions(RULE):
        assert load_card(version.folder).version == version.id
    assert [version.parent for version in registry.versions(RULE)] == [None, first, first]
    kinds = [(event.kind, event.actor, event.version) for event in registry.events()]
    assert kinds[-3:] == [
        *(("published", "ann", third), ("rolled_back", "bob", first)),
        ("published", "ann", second),
    ]
    registry.verify()


def test_the_same_weights_again_are_no_version_and_another_threshold_is_one(
    registry: Registry,
) -> None:
    """Of which the weights are stored once."""
    (first,) = registered(registry, b"first")
    registered(registry, b"first")
    assert len(registry.versions(RULE)) == 1 and len(registry.events()) == 2
    folder = Runs(registry.root.parent).adapter("tiny", "mild", "alora")
    read_card(folder).model_copy(update={"threshold": 0.9}).save(folder)
    second = registry.register(folder, actor="ann", note="calibrated").id
    name = next(iter(read_card(folder).files))
    assert registry.folder(first).joinpath(name).samefile(registry.folder(second) / name)
    assert registry.aliases(RULE) == {"champion": first, "candidate": second}


@pytest.mark.parametrize(
    ("rule", "version", "reason", "problem"),
    [
        ("mild", "second", " ", "reason is missing"),
        ("mild", "ffff", "better", "no version of tiny/mild/alora begins so"),
        ("mild", "", "better", "2 versions of tiny/mild/alora begin so"),
        ("milt", "second", "better", "no version of tiny/milt/alora.*Did you mean"),
    ],
)
def test_what_cannot_be_decided_changes_nothing(
    registry: Registry, rule: str, version: str, reason: str, problem: str
) -> None:
    _, second = registered(registry, b"first", b"second")
    aliases, events = registry.aliases(RULE), registry.events()
    named = second if version == "second" else version
    with pytest.raises(GuardError, match=problem):
        registry.publish(RULE._replace(rule=rule), named, actor="ann", reason=reason)
    assert registry.aliases(RULE) == aliases and registry.events() == events


def test_the_champion_is_not_published_again(registry: Registry) -> None:
    first, _ = registered(registry, b"first", b"second")
    with pytest.raises(GuardError, match="champion already"):
        registry.publish(RULE, first, actor="ann", reason="again")


def test_damaged_weights_are_not_published_and_are_healed_by_the_same_ones(
    registry: Registry,
) -> None:
    _, second = registered(registry, b"first", b"second")
    folder = registry.folder(second)
    name = next(iter(read_card(folder).files))
    (folder / name).chmod(0o644)
    (folder / name).write_bytes(b"torn")
    for check in (
        registry.verify,
        lambda: registry.publish(RULE, second, actor="ann", reason="better"),
    ):
        with pytest.raises(GuardError, match="not those of the card"):
            check()
    registered(registry, b"second")
    registry.verify()


def test_weights_of_another_seed_and_unfinished_ones_are_not_registered(
    registry: Registry, tmp_path: Path
) -> None:
    folder = trained(Runs(tmp_path))
    read_card(folder).model_copy(update={"seed": 1}).save(folder)
    with pytest.raises(GuardError, match="another seed"):
        registry.register(folder, actor="ann", note="trained")
    with pytest.raises(GuardError, match="not finished weights"):
        registry.register(tmp_path, actor="ann", note="trained")
    assert registry.rules() == [] and registry.champions("tiny", "alora") == {}


def test_a_version_is_on_trial_until_it_is_taken_back_or_another_is_champion(
    registry: Registry,
) -> None:
    first, second, third = registered(registry, b"first", b"second", b"third")

    def set_mode(version: str, mode: str) -> None:
        parsed = Mode.parse(mode)
        registry.set_mode(RULE, version, parsed, gate=Gate(), actor="ann", reason="look")

    def modes() -> tuple[str, str | None, str | None]:
        """Of the champion and of the version on trial, and which that is."""
        registry.verify()
        rollout = Registry(Runs(registry.root.parent)).rollout(RULE)
        assert rollout is not None and rollout == registry.rollout(RULE)
        if rollout.trial is None:
            return str(rollout.mode), None, None
        assert rollout.trial.folder == registry.folder(rollout.trial.version)
        return str(rollout.mode), str(rollout.trial.mode), rollout.trial.version

    assert modes() == ("enforce", None, None)
    set_mode(second, "shadow")
    set_mode(second, "canary:10%")
    assert modes() == ("enforce", "canary:10%", second)
    for version, mode, problem in (
        (third, "shadow", "another version is on trial"),
        (third, "off", "another version is on trial"),
        (third, "enforce", "only a champion is enforced"),
    ):
        with pytest.raises(GuardError, match=problem):
            set_mode(version, mode)
    set_mode(first, "shadow")
    assert modes() == ("shadow", "canary:10%", second)
    trial = getattr(registry.rollout(RULE), "trial", None)
    set_mode(second, "shadow")
    registry.abort(RULE, trial, actor="its gate", reason="it flags all")  # that is over already
    assert modes() == ("shadow", "shadow", second)
    trial = getattr(registry.rollout(RULE), "trial", None)
    registry.abort(RULE, trial, actor="its gate", reason="it flags all")
    registry.abort(RULE, trial, actor="its gate", reason="it flags all")
    assert modes() == ("shadow", None, None)
    last = registry.events()[-1]
    assert (last.kind, last.version, last.mode) == ("aborted", second, "off")
    set_mode(third, "shadow")
    registry.publish(RULE, second, actor="ann", reason="better")
    assert modes() == ("shadow", None, None)  # whoever shadows a rule shadows its next version
    set_mode(second, "enforce")
    set_mode(third, "off")
    assert modes() == ("enforce", None, None)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE event SET reason = 'another' WHERE number = 2",
        "DELETE FROM event WHERE number = 2",
        "UPDATE event SET actor = 'nobody' WHERE number = 1",
    ],
)
def test_an_event_that_was_edited_or_taken_out_is_named(registry: Registry, statement: str) -> None:
    registered(registry, b"first", b"second")
    with sqlite3.connect(registry.file) as connection:
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)
        connection.execute("DROP TRIGGER event_is_kept")
        connection.execute("DROP TRIGGER event_stays")
        connection.execute(statement)
    with pytest.raises(GuardError, match=r"event [12] is not the one that was written"):
        registry.verify()


def test_a_mode_that_no_event_has_set_is_named(registry: Registry) -> None:
    registered(registry, b"first")
    with sqlite3.connect(registry.file) as connection:
        columns = "model, rule, method, 0, 1"
        connection.execute(f"INSERT INTO mode SELECT {columns} FROM version")
    with pytest.raises(GuardError, match=r"no event made the champion of .* or set its modes"):
        registry.verify()


def test_a_registry_that_is_newer_broken_or_held_is_an_error_that_says_so(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = registered(registry, b"first", b"second")
    monkeypatch.setattr("serve.registry.database.LOCKED_S", 0.1)
    holder = sqlite3.connect(registry.file, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(GuardError, match="cannot be used: database is locked"):
        registry.publish(RULE, second, actor="ann", reason="better")
    assert registry.champions("tiny", "alora")  # which can be read meanwhile
    holder.execute("ROLLBACK")
    holder.execute("PRAGMA user_version = 9")
    with pytest.raises(GuardError, match=r"newer version of this program \(got 9\)"):
        registry.rules()
    holder.close()
    registry.file.write_bytes(b"no database at all, whatever it was before" * 99)
    with pytest.raises(GuardError, match="damaged"):
        registry.rules()


def test_another_program_s_weights_make_room_for_what_this_one_can_serve(
    registry: Registry,
) -> None:
    """After an update the champion would be refused, and its successor wait for ever."""
    folder = trained(Runs(registry.root.parent))
    read_card(folder).model_copy(update={"prompt_hash": "earlier"}).save(folder)
    earlier = registry.register(folder, actor="ann", note="trained").id
    (second,) = registered(registry, b"second")
    assert registry.aliases(RULE) == {"champion": second, "previous": earlier}
    assert "cannot serve" in registry.events()[-1].reason
    registry.verify()


def test_a_candidate_is_what_was_trained_last(registry: Registry) -> None:
    """Also what was trained before, and not what led back to the champion."""
    first, second, _ = registered(registry, b"first", b"second", b"third")
    registered(registry, b"second")
    assert registry.aliases(RULE) == {"champion": first, "candidate": second}
    registered(registry, b"first")
    assert registry.aliases(RULE) == {"champion": first}


def test_a_champion_that_no_event_made_is_noticed(registry: Registry) -> None:
    _, second = registered(registry, b"first", b"second")
    with sqlite3.connect(registry.file) as connection:
        connection.execute("UPDATE alias SET version = ? WHERE name = 'champion'", (second,))
    with pytest.raises(GuardError, match="no event made the champion"):
        registry.verify()


def test_champions_are_read_again_when_another_process_changes_them(registry: Registry) -> None:
    first, second = registered(registry, b"first", b"second")
    assert registry.champions("tiny", "alora") == {"mild": registry.folder(first)}
    Registry(Runs(registry.root.parent)).publish(RULE, second, actor="ann", reason="better")
    assert registry.champions("tiny", "alora") == {"mild": registry.folder(second)}


def test_a_file_system_without_links_takes_copies(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("serve.registry.registry.os.link", refused)
    registered(registry, b"first", b"second")
    registry.verify()


def test_a_full_disk_leaves_nothing_half_written(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(registry, b"first")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(GuardError, match="No space left"):
        patched.setattr("serve.registry.registry.shutil.copyfile", full)
        registered(registry, b"second")
    assert (
        len(list((registry.root / "versions").iterdir())) == 1 and len(registry.versions(RULE)) == 1
    )


def _register(root: Path, number: int) -> None:
    registry = Registry(Runs(root))
    folder = save_weights(root / "mine" / str(number), f"weights {number}".encode())
    registry.register(folder, actor=f"process {number}", note="trained")


def test_processes_register_at_once_and_one_of_them_is_first(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_register, args=(tmp_path, number)) for number in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    registry = Registry(Runs(tmp_path))
    assert len(registry.versions(RULE)) == 6
    assert [event.kind for event in registry.events()].count("published") == 1
    registry.verify()


def _decide_for_ever(root: Path) -> None:
    registry = Registry(Runs(root))
    for number in range(10_000):
        folder = save_weights(root / "mine", f"weights {number}".encode())
        version = registry.register(folder, actor="ann", note="trained")
        if number:
            registry.publish(RULE, version.id, actor="ann", reason="better")
            before = registry.aliases(RULE)["previous"]
            registry.publish(RULE, before, actor="ann", reason="worse", back=True)


@pytest.mark.parametrize("milliseconds", range(40, 240, 20))
def test_a_kill_at_any_moment_leaves_a_whole_registry(tmp_path: Path, milliseconds: int) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_decide_for_ever, args=(tmp_path,))
    process.start()
    assert process.pid is not None
    process.join(milliseconds / 1000)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    registry = Registry(Runs(tmp_path))
    registry.verify()
    champions = registry.champions("tiny", "alora")
    for folder in champions.values():
        load_card(folder)
    folder = save_weights(tmp_path / "mine", b"the last one")
    last = registry.register(folder, actor="ann", note="trained")
    assert registry.aliases(RULE)["candidate" if champions else "champion"] == last.id
    assert json.loads((last.folder / "card.json").read_text())["version"] == last.id
