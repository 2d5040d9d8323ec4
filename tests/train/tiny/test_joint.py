"""The base trained with adapters: adapters act as in PEFT, the base learns what they ask for, an
interrupted run resumes.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from guard.errors import GuardError
from guard.recipe import MODELS
from tests.train.conftest import MakeJob, data, with_lora
from train.adapter.load import load_base
from train.adapter.predict import verdict_logits
from train.adapter.settings import lora_config
from train.job import Job
from train.tiny.batch import labels_of
from train.tiny.distil import Distilled
from train.tiny.export import TrainingRecord, export, export_joint
from train.tiny.joint import Course, JointModel, train, validate
from train.tiny.student import Student, digest_of, new_student
from train.tiny.vocabulary import vocabulary_of

pytestmark = pytest.mark.slow


def save_adapter(job: Job, folder: Path, seed: int) -> Path:
    """A random aLoRA of the job's base, as PEFT writes it."""
    torch.manual_seed(seed)
    model = get_peft_model(load_base(job.recipe, torch.device("cpu")), lora_config(job))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    return make_job("alora")


@pytest.fixture
def course(job: Job, tmp_path: Path) -> Course:
    folders = [save_adapter(job, tmp_path / f"adapter{seed}", seed) for seed in (1, 2)]
    rows = data(job)
    flipped = replace(
        rows,
        train=tuple(replace(row, id=f"not-{row.id}", label=1 - row.label) for row in rows.train),
    )
    return Course(Path(job.recipe.base), folders, [rows, flipped], job.builder, steps=6, lr=1e-3)


def test_rows_of_several_adapters_in_one_pass_are_each_as_in_peft(job: Job, course: Course) -> None:
    rows = list(data(job).test[:10])
    builder = job.builder
    plain = []
    for folder in course.folders:
        peft = PeftModel.from_pretrained(load_base(job.recipe, torch.device("cpu")), str(folder))
        plain.append(verdict_logits(peft, [row.prompt for row in rows], builder))
    adapters = [index % 2 for index in range(len(rows))]
    with torch.no_grad():
        after = JointModel(course.base, course.folders).logits(rows, adapters).double()
    logits = after[:, builder.yes_id] - after[:, builder.no_id]
    assert logits.tolist() == pytest.approx(
        [plain[adapter][row] for row, adapter in enumerate(adapters)], abs=1e-4
    )
    assert (
        max(abs(first - second) for first, second in zip(*plain, strict=True)) > 0.1
    )  # so that a mix-up would show


def test_what_carries_a_rule_is_learnt_by_base_and_adapters(course: Course, tmp_path: Path) -> None:
    course = replace(course, steps=60, rows=[course.rows[0]] * 2)
    before = JointModel(course.base, course.folders)
    after = train(course, tmp_path / "checkpoint.pt")
    assert min(validate(after, course)) > max(0.9, *validate(before, course))
    old, new = before.take_out().state_dict(), after.take_out().state_dict()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == set(old) - {"model.embed_tokens.weight", "lm_head.weight"}


def test_an_interrupted_run_ends_with_the_same_weights(course: Course, tmp_path: Path) -> None:
    straight = train(course, tmp_path / "straight.pt").model.state_dict()
    train(course, tmp_path / "cut.pt", stop_after=4)
    resumed = train(course, tmp_path / "cut.pt").model.state_dict()
    assert all(torch.allclose(straight[name], resumed[name], atol=1e-6) for name in straight)
    assert straight.keys() == resumed.keys()


def test_a_checkpoint_of_other_rows_or_phrasings_is_refused(course: Course, tmp_path: Path) -> None:
    train(course, tmp_path / "checkpoint.pt", stop_after=1)
    with pytest.raises(GuardError, match="something else"):
        train(replace(course, rows=[course.rows[0]] * 2), tmp_path / "checkpoint.pt")
    with pytest.raises(GuardError, match="something else"):
        train(replace(course, phrasings={"toxicity": "edited"}), tmp_path / "checkpoint.pt")


def test_a_checkpoint_of_an_adapter_that_was_trained_again_is_refused(
    job: Job, course: Course, tmp_path: Path
) -> None:
    train(course, tmp_path / "checkpoint.pt", stop_after=1)
    save_adapter(job, course.folders[1], 3)
    with pytest.raises(GuardError, match="something else"):
        train(course, tmp_path / "checkpoint.pt")


def test_an_adapter_of_another_shape_is_refused(job: Job, course: Course, tmp_path: Path) -> None:
    smaller = save_adapter(with_lora(job, r=8), tmp_path / "smaller", 3)
    with pytest.raises(GuardError, match=r"smaller: an adapter of another shape"):
        JointModel(course.base, [*course.folders, smaller])


@pytest.mark.parametrize(
    "scaling", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 4}}, {"rank_pattern": {"q": 4}}]
)
def test_an_adapter_whose_layers_are_scaled_otherwise_is_refused(
    job: Job, course: Course, tmp_path: Path, scaling: dict[str, object]
) -> None:
    other = save_adapter(with_lora(job, **scaling), tmp_path / "other", 3)
    with pytest.raises(GuardError, match=rf"other: '{next(iter(scaling))}' would not be read"):
        JointModel(course.base, [*course.folders, other])


def test_the_exported_base_tells_what_it_was_made_for(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny")
    with torch.no_grad():
        model.model.norm.weight += 1
    joint = {
        "steps": 7,
        "rules": ["pii_leak", "toxicity"],
        "rows_a_step": 4,
        "peak_learning_rate": 3e-4,
    }
    base = tmp_path / "base"
    shutil.copytree(MODELS / "tiny", base)
    phrasings = {"pii_leak": "edited since", "new_rule": "as it began"}
    export_joint(model, base, tmp_path / "new", joint, phrasings, tmp_path / "none.json")
    provenance = json.loads((tmp_path / "new" / "provenance.json").read_text())
    seen_before = json.loads((base / "provenance.json").read_text())["phrasings"]
    of_both = provenance["phrasings"]["pii_leak"]  # what either book shows was seen
    assert of_both not in (seen_before["pii_leak"], "edited since")
    seen_since = {"pii_leak": of_both, "new_rule": "as it began"}
    assert provenance["phrasings"] == seen_before | seen_since
    card = " ".join((tmp_path / "new" / "README.md").read_text().split())
    assert provenance["joint"] == joint
    assert provenance["weights_sha256"] == digest_of(tmp_path / "new") != digest_of(base)
    assert provenance["corpora"] == json.loads((base / "provenance.json").read_text())["corpora"]
    assert "In 7 steps of 4 rows at a peak learning rate of 0.0003" in card
    assert "(`train/tiny/build_joint.py`): pii_leak, toxicity." in card
    vocabulary = vocabulary_of(base)
    distilled = Distilled(
        Student(new_student(vocabulary), labels_of([])),
        1,
        {"turn_cosine": 0.9, "verdict_accuracy": 0.9},
    )
    record = TrainingRecord([], peak_lr=1e-3, base=tmp_path / "new")
    export(distilled, vocabulary.tokenizer, tmp_path / "on", record, tmp_path / "none.json")
    went_on = json.loads((tmp_path / "on" / "provenance.json").read_text())
    assert (went_on["joint"], went_on["phrasings"]) == (joint, provenance["phrasings"])
