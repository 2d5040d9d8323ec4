"""The written checkpoint and its card, and what must hold for the base that is committed."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from guard.recipe import MODELS
from train.tiny.batch import labels_of
from train.tiny.distil import Distilled
from train.tiny.export import TrainingRecord, export, phrasings_of
from train.tiny.lessons.corpus import CorpusSource
from train.tiny.student import Student, new_student
from train.tiny.teacher import FOLDER
from train.tiny.vocabulary import NOT_SPECIAL, SPECIAL, UNKNOWN, cut_vocabulary, vocabulary_of

COMMITTED = MODELS / "tiny"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    vocabulary = cut_vocabulary(FOLDER, ["good morning"], 1500)
    torch.manual_seed(0)
    distilled = Distilled(
        Student(new_student(vocabulary), labels_of([])),
        1234,
        {"turn_cosine": 0.876, "verdict_accuracy": 0.9},
    )
    sources = [
        CorpusSource(
            "talk.jsonl.gz",
            [()] * 1500,
            ("CC-BY-4.0", "CC-BY-SA-4.0"),
            "sha256:0123456789abcdef",
            ("somebody/talk",),
        ),
        CorpusSource("org/name", [()], ("MIT",), "datasets:fedcba9876543210"),
    ]
    record = TrainingRecord(sources, peak_lr=2e-3, note="Begun twice")
    export(distilled, vocabulary.tokenizer, folder, record, folder / "none.json")
    return folder


def test_transformers_loads_the_checkpoint(exported: Path) -> None:
    tokenizer, model = (
        AutoTokenizer.from_pretrained(exported),
        AutoModelForCausalLM.from_pretrained(exported),
    )
    ids = tokenizer("good morning<|im_end|>", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, ids.shape[1], 1500)


def test_the_card_tells_this_base_and_no_other(exported: Path) -> None:
    card = (exported / "README.md").read_text()
    for sentence in (
        "license: cc-by-sa-4.0",
        "with 10.0 M parameters",
        "1,500 token ids",
        "1,234 steps",
        "learning rate 0.002",
        "tenth of the positions. Begun twice |",
        "cosine to the teacher 0.88, rule questions answered right 90%",
        "| talk.jsonl.gz | somebody/talk | 1,500 | CC-BY-4.0, CC-BY-SA-4.0 | "
        "`sha256:0123456789ab` |",
        "| org/name |  | 1 | MIT | `datasets:fedcba9876` |",
        "## What it cannot do",
        "Not measured on these weights.",
    ):
        assert sentence in card


def test_the_provenance_names_the_weights(exported: Path) -> None:
    written = provenance(exported)
    sha256 = hashlib.sha256((exported / "model.safetensors").read_bytes()).hexdigest()
    assert written["weights_sha256"] == sha256
    assert written["corpora"][1] == {
        "name": "org/name",
        "origins": [],
        "conversations": 1,
        "licences": ["MIT"],
        "digest": "datasets:fedcba9876543210",
    }
    assert written["shape"]["vocab_size"] == 1500


def test_a_base_that_goes_on_from_another_counts_its_steps_and_keeps_its_notes(
    exported: Path, tmp_path: Path
) -> None:
    vocabulary = vocabulary_of(exported)
    distilled = Distilled(
        Student(new_student(vocabulary), labels_of([])),
        100,
        {"turn_cosine": 0.9, "verdict_accuracy": 0.9},
    )
    phrasings = {"pii_leak": "as it is now", "toxicity": "as it is now"}
    record = TrainingRecord([], 1e-3, phrasings, "Then on acts", exported)
    export(distilled, vocabulary.tokenizer, tmp_path, record, tmp_path / "none.json")
    written = provenance(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert (written["steps"], written["rules"]) == (1334, ["pii_leak", "toxicity"])
    assert written["phrasings"] == phrasings
    assert "tenth of the positions. Begun twice. Then on acts |" in card
    names = "phrase books of these rules (`data/generator/phrases`): pii_leak, toxicity."
    assert names in " ".join(card.split())
    assert "phrase books of" not in (exported / "README.md").read_text()


def test_phrasings_that_have_changed_between_two_bases_are_those_of_neither(
    exported: Path, tmp_path: Path
) -> None:
    """What either shows was seen, so no phrase book may pass for one whose rest is unseen."""
    vocabulary = vocabulary_of(exported)
    distilled = Distilled(
        Student(new_student(vocabulary), labels_of([])),
        1,
        {"turn_cosine": 0.9, "verdict_accuracy": 0.9},
    )
    of_rounds = [
        {"pii_leak": "kept", "toxicity": "before"},
        {"pii_leak": "kept", "toxicity": "after", "off_topic": "new"},
    ]
    base = exported
    for number, phrasings in enumerate(of_rounds):
        record = TrainingRecord([], 1e-3, phrasings, "", base)
        folder = tmp_path / str(number)
        export(distilled, vocabulary.tokenizer, folder, record, tmp_path / "none.json")
        base = folder
    written = provenance(base)["phrasings"]
    assert written.pop("toxicity") not in ("before", "after")
    assert written == {"pii_leak": "kept", "off_topic": "new"}


def provenance(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "provenance.json").read_text())  # type: ignore[no-any-return]


def test_the_committed_base_is_small_enough_to_commit_and_is_what_its_provenance_says() -> None:
    weights = COMMITTED / "model.safetensors"
    with safe_open(weights, "pt") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 - it is no mapping
    parameters = sum(torch.Size(shape).numel() for shape in shapes)
    assert parameters <= 16e6
    assert weights.stat().st_size <= 32e6
    assert provenance(COMMITTED)["parameters"] == parameters
    assert (
        provenance(COMMITTED)["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    )


def test_what_the_tests_call_unseen_was_unseen_by_the_committed_base() -> None:
    """A failure says that a phrase book was edited: the base may have seen what is called unseen.

    Say so in its card, or train it again.
    """
    recorded = provenance(COMMITTED)["phrasings"]
    assert set(recorded) == set(provenance(COMMITTED)["joint"]["rules"])
    assert phrasings_of(list(recorded)) == recorded


def test_the_committed_base_has_qwen3s_architecture_context_and_control_tokens() -> None:
    config = json.loads((COMMITTED / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] >= 8192
    added = [
        token
        for token in json.loads((COMMITTED / "tokenizer.json").read_text())["added_tokens"]
        if token["content"] != UNKNOWN
    ]
    assert [(token["content"], token["special"]) for token in added] == [
        *((token, True) for token in SPECIAL),
        *((token, False) for token in NOT_SPECIAL),
    ]
    assert len(added) == 26
    assert [token["id"] for token in added] == list(
        range(config["vocab_size"] - 26, config["vocab_size"])
    )
