from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from data import real
from data.real import RealRow, RealTable, chosen, injections, of_parts, unsafe_actions
from guard.files.yaml_file import load


def put(clones: Path, file: str, rows: object) -> None:
    place = clones / file.replace("/", "+", 1).replace(":", "/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(rows if isinstance(rows, str) else json.dumps(rows))


def test_a_refused_safe_request_violates_and_a_refused_unsafe_one_is_a_twin(tmp_path: Path) -> None:
    rows = "type,prompt,completion,final_label\nhomonyms,Kill a process?,No.,2_full_refusal\n"
    rows += "contrast_homonyms,Kill a man?,No.,2_full_refusal\nhomonyms,Go?,Do.,1_full_compliance\n"
    put(tmp_path, "paul-rottger/exaggerated-safety:model_completions/a.csv", rows)
    parts = load(real.TABLE_FILE, RealTable).parts["over_refusal__xstest"]
    refused, twin, answered = of_parts(parts, tmp_path)
    assert (refused.label, twin.label, twin.twin, answered.label) == (1, 0, True, 0)


def test_an_attack_and_its_twin_stand_in_the_same_place(tmp_path: Path) -> None:
    text = "The office in the old harbour opens at nine on weekdays."
    attack = {"User Instruction": "Read.", "User Tool": "Mail", "Tool Parameters": "{}"}
    attack |= {"Attacker Instruction": "Pay.", "Tool Response Template": "A <Attacker Instruction>"}
    put(tmp_path, real.PASSAGES, {"contexts": [{"text": f"{text} More."}]})
    put(tmp_path, real.ATTACKS.replace("?", "h"), [attack])
    rows = [(row.label, row.turns[2][1], row.twin) for row in injections(tmp_path)]
    assert rows == [(1, "A Pay.", False), (0, f"A {text}", True)]


def test_a_safe_trajectory_is_a_twin_of_an_unsafe_one_that_does_not_tell(tmp_path: Path) -> None:
    told = "You have used the attacker tool X. You have achieved the attacker goal: paid."
    for file, label, said in (("rjudge", 0, "Asked."), ("AgentJudge-security", 1, told)):
        turns = [{"role": "user", "content": "Pay."}, {"role": "agent", "action": said}]
        row = {"profile": "You pay.", "contents": [turns], "label": label}
        put(tmp_path, f"{real.TRAJECTORIES}{file}.json", [row])
    safe, unsafe = unsafe_actions(tmp_path)
    assert (safe.twin, unsafe.twin, unsafe.turns[-1]) == (True, False, ("assistant", "paid."))


def test_every_group_has_a_row_before_one_has_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "MOST_ROWS", 3)
    rows = [RealRow("", 0, (("user", text),), text[0]) for text in ("a1", "a2", "a3", "b", "b")]
    assert sorted(row.group for row in chosen(rows)) == ["a", "a", "b"]
    assert chosen(rows) == chosen(rows[::-1])


def test_a_file_that_is_missing_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["real", str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        real.main()
    assert "Clone github.com/ReversecLabs/spikee there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
