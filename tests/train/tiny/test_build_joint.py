"""One step of the tiny base together with a random aLoRA of one rule."""

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from guard.layout import Runs
from guard.recipe import MODELS
from tests.train.conftest import write_toy_data
from train.tiny import build_joint
from train.tiny.student import digest_of

pytestmark = pytest.mark.slow

RULE = "pii_leak"


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: object) -> None:
    places = ("--rows", folder, "--runs", folder, "--out", folder / "base", "--work", folder)
    options = ("--rules", RULE, "--steps", 1, *arguments)
    monkeypatch.setattr(sys, "argv", ["build_joint", *map(str, (*places, *options))])
    build_joint.main()


def save_adapter(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny", dtype=torch.float32)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(folder))


def test_base_and_card_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_adapter(Runs(tmp_path).adapter("tiny", RULE, "alora"))
    write_toy_data(Runs(tmp_path).data(RULE), n_train=8, n_other=8, rule=RULE)
    run(monkeypatch, tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[0] == RULE
    assert printed[-1] == f"wrote {tmp_path / 'base'}"
    provenance = json.loads((tmp_path / "base" / "provenance.json").read_text())
    joint = provenance["joint"]
    assert (joint["rules"], joint["steps"], joint["rows_a_step"]) == ([RULE], 1, 2)
    assert provenance["weights_sha256"] == digest_of(tmp_path / "base")
    assert provenance["weights_sha256"] != digest_of(MODELS / "tiny")


def test_a_missing_adapter_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path)
    error = capsys.readouterr().err
    assert f"{RULE}/alora: no adapter to begin with. Run `make train RULE=all`" in error


def test_the_base_it_goes_on_from_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--base", tmp_path / "base")
    assert "would take the place of the one it goes on from" in capsys.readouterr().err
