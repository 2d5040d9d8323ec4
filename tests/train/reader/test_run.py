"""The reader as it is trained: its files answer as training did, in plain PEFT too."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file

from guard.errors import GuardError
from guard.layout import Runs
from guard.method import HEAD
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from guard.weights.card import load_card
from guard.weights.head import Head
from tests.train.conftest import FILLER, recipe
from train.adapter.reader import load_reader
from train.base import load_served_base
from train.reader import export, rows, trainer
from train.reader import run as command
from train.reader.rows import TokenUnit, read, steps

pytestmark = pytest.mark.slow


def write_units(runs: Runs, count: int = 24) -> None:
    """Conversations that hold one of two words, under policies that forbid one of them."""
    rng = random.Random(0)
    for split in ("train", "validation", "test"):
        lines: list[str] = []
        for _ in range(count):
            pair = rng.sample(("refund", "banana", "music"), 2)
            said = [" ".join([*rng.sample(FILLER, 3), word]) for word in pair]
            conversations = [[{"role": "user", "content": text}] for text in said]
            policies = [f"Nobody may mention a {word}." for word in pair]
            unit = {"source": "toy", "conversations": conversations, "policies": policies}
            lines.append(json.dumps(unit | {"labels": [[1, 0], [0, 1]]}))
        file = runs.reader / "data" / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    runs = Runs(tmp_path / "runs")
    write_units(runs)
    return runs


@pytest.fixture
def toy(toy_base: Path, tmp_path: Path) -> Recipe:
    made = recipe(toy_base)
    alora = made.methods["alora"].model_copy(update={"head": {}})
    return made.model_copy(update={"methods": {"alora": alora}, "reader": str(tmp_path / "reader")})


def test_its_files_answer_in_plain_peft_as_it_did(
    toy: Recipe, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "LEARNING_RATE", 1e-2)
    folder = Path(str(toy.reader))
    answered: list[Sequence[float]] = []
    answers = trainer.ReaderInTraining.answers

    def recorded(self: trainer.ReaderInTraining, units: Sequence[TokenUnit]) -> export.Answers:
        answered.append(answers(self, units)[0])
        return answers(self, units)

    monkeypatch.setattr(trainer.ReaderInTraining, "answers", recorded)
    card = command.run(toy, runs, folder)
    assert load_card(folder).version == card.version == load_reader(toy).card.version
    assert not (runs.reader / trainer.CHECKPOINT).exists()
    monkeypatch.setattr(export, "calibrate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command.run(toy, runs, folder)
    assert load_card(folder).version == card.version  # the reader in use stays
    assert set(card.metrics["held_out"]) == {"n", "all", "toy"}
    units = read(runs.reader / "data/validation.jsonl", PromptBuilder.of(toy))
    by_length = sorted(units, key=lambda unit: unit.longest)
    base = load_served_base(toy, torch.device("cpu"))
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    head = Head.of_tensors(load_file(folder / HEAD), "", "")
    expected: list[float] = []
    for unit in by_length:
        for place, suffix in zip(unit.stands_on, unit.suffixes, strict=True):
            ids = torch.tensor([[*unit.prefixes[place], *suffix]])
            with torch.no_grad():
                states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
            expected.append(float(states[0, -1].numpy() @ head.weight) + head.bias)
    assert answered[0] == pytest.approx(expected, abs=1e-3)
    assert max(expected) - min(expected) > 0.1


def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(
    toy: Recipe, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = PromptBuilder.of(toy)
    units = read(runs.reader / "data/train.jsonl", builder)
    batches = [units[start : start + 4] for start in range(0, 24, 4)]
    config = export.adapter_config(toy, builder)

    def trained(folder: str, inputs: str = "data") -> list[torch.Tensor]:
        reader = trainer.ReaderInTraining(toy, config, 0)
        trainer.train(reader, batches, runs.root / folder, inputs)
        return [weight.detach() for weight in reader.weights]

    whole = trained("whole")
    monkeypatch.setattr(trainer, "CHECKPOINT_S", 0)
    loss = trainer.ReaderInTraining.loss
    calls: list[int] = []

    def killed(self: trainer.ReaderInTraining, units: list[TokenUnit]) -> torch.Tensor:
        calls.append(len(units))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss(self, units)

    monkeypatch.setattr(trainer.ReaderInTraining, "loss", killed)
    with pytest.raises(KeyboardInterrupt):
        trained("killed")
    resumed = trained("killed")
    assert len(calls) == 4 + 3  # three steps were kept
    assert all(torch.equal(*pair) for pair in zip(whole, resumed, strict=True))
    calls.clear()
    monkeypatch.setattr(trainer.ReaderInTraining, "loss", loss)
    of_other_data = trained("killed", "other data")  # from the beginning
    assert all(torch.equal(*pair) for pair in zip(whole, of_other_data, strict=True))


def test_each_unit_is_in_one_step_and_short_policies_come_first(
    toy: Recipe, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "STEP_TOKENS", 200)
    units = read(runs.reader / "data/train.jsonl", PromptBuilder.of(toy))
    long = [TokenUnit(((n,),), (0,), ((n,) * 700,), (1,), "long", ()) for n in range(9)]
    batches = steps([*long, *units], 0)
    taken = [id(unit) for batch in batches for unit in batch]
    assert sorted(taken) == sorted(map(id, [*long, *units]))
    assert batches[0][0].source == "toy" and steps([*long, *units], 0) == batches


def test_without_data_or_a_place_nothing_is_trained(
    toy: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GuardError, match="no such file"):
        command.run(toy, Runs(tmp_path / "empty"), tmp_path / "reader")
    monkeypatch.setattr(
        "guard.recipe.load_recipe", lambda _: toy.model_copy(update={"reader": None})
    )
    monkeypatch.setattr(sys, "argv", ["run"])
    with pytest.raises(SystemExit):
        command.main()
    assert "names no reader" in capsys.readouterr().err
