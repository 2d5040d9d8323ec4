"""What makes weights outdated, who trains them, and how their folder takes another's place."""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from guard.errors import GuardError
from guard.layout import mark_current
from guard.method import METHODS, PEFT_WEIGHTS
from guard.recipe import KINDS, load_recipe
from guard.verdict import Calibration
from guard.weights.card import CARD, load_card
from guard.weights.version_zero import card_of_reader
from serve.registry.registry import RegisteredRule, Registry
from tests.train import conftest as toys
from train.calibration.validation import validation_metrics
from train.export import export, register
from train.job import LOCK, Job
from train.methods import TRAINERS, trainer_of


def test_all_that_decides_is_fingerprinted_and_nothing_else(
    make_job: toys.MakeJob, make_encoder_job: toys.MakeEncoderJob
) -> None:
    job = make_job()
    inputs, lora = job.inputs, job.recipe.methods["lora"]
    for name, changed in {
        "seed": replace(job, seed=1),
        "method": replace(job, method="alora"),
        "title": toys.with_rule(job, title="Nobody may mention a return."),
        "dtype": toys.with_recipe(job, dtype="bfloat16"),
        "trainer": toys.with_recipe(job, trainer={**job.recipe.trainer, "weight_decay": 0.1}),
        "base": toys.with_recipe(job, base="someone/else", revision="0" * 40),
        "4 bits": toys.with_recipe(job, quantization="nf4"),
        "min_steps": toys.with_settings(job, min_steps=300),
    }.items():
        assert changed.inputs != inputs, name
    for name, changed in {
        "policy": toys.with_rule(job, policy="Another policy"),
        "max_fpr": toys.with_rule(job, max_fpr=0.02, max_fpr_twins=0.1),
        "who is judged, on a decoder": toys.with_rule(job, judged="user"),
        "engine": toys.with_recipe(job, engine={"max_lora_rank": 64}),
        "the other method": toys.with_recipe(job, methods=job.recipe.methods | {"alora": lora}),
    }.items():
        assert changed.inputs == inputs, name
    for split in ("train", "validation", "test"):
        before = replace(job).inputs
        with (job.data / f"{split}.jsonl").open("a") as file:
            file.write("\n")
        assert replace(job).inputs != before, split
    of_encoder = make_encoder_job(judged="assistant")
    assert (of_encoder.reads, job.reads) == ("assistant", "conversation")
    assert toys.with_rule(job, judged="user", turns="last").reads == "last user"  # the words
    assert of_encoder.inputs != make_encoder_job(judged="user").inputs


def test_checkpoints_of_the_same_inputs_alone_stay(make_job: toys.MakeJob) -> None:
    job = make_job()
    job.open_scratch()
    left = job.scratch / "checkpoint-5"
    for is_cut_off in (False, True):
        left.mkdir()
        job.open_scratch()
        assert left.is_dir()
        if is_cut_off:
            (job.scratch / "inputs.json").write_text("")
        else:
            toys.with_rule(job, title="Nobody may mention a return.").open_scratch()
        job.open_scratch()
        assert not left.exists() and job.scratch.is_dir()


def test_a_forgotten_job_keeps_its_weights_and_its_lock(make_job: toys.MakeJob) -> None:
    """The lock until the scratch folder is closed."""
    job = make_job()
    job.folder.mkdir(parents=True)
    weights = job.folder / "adapter_model.safetensors"
    weights.write_bytes(b"weights")
    mark_current(job.folder, job.inputs)
    job.claim()
    job.open_scratch()
    job.forget()
    assert weights.is_file()
    assert not (job.folder / "stage.json").exists()
    assert [path.name for path in job.scratch.iterdir()] == [LOCK]
    with (job.scratch / LOCK).open("w") as another:
        with pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        job.close_scratch()
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_another_way_to_read_words_outdates(
    job: Job, make_job: toys.MakeJob, monkeypatch: MonkeyPatch
) -> None:
    """A head, and an adapter as well: an encoder's reads words too."""
    before = [job.inputs, make_job().inputs]
    monkeypatch.setattr("guard.weights.head.MOST_NGRAMS", 100)
    assert replace(job).inputs != before[0]
    assert make_job().inputs != before[1]


METRICS = validation_metrics([-1.0, -0.5, 0.5, 1.0] * 8, [0, 1, 0, 1] * 8, Calibration())


def of_steps(make_job: toys.MakeJob, steps: int) -> Job:
    job = make_job(max_steps=steps)
    toys.finish_at_once(job)
    return job


def rule_of(job: Job) -> RegisteredRule:
    return RegisteredRule(job.recipe.name, job.rule.id, job.method)


def steps_of(folder: Path) -> int:
    steps: int = load_card(folder).recipe["trainer"]["max_steps"]
    return steps


def test_every_training_is_a_version_and_a_damaged_one_is_none(make_job: toys.MakeJob) -> None:
    """Of seed 0, which is served."""
    for steps in (1, 2, 3):
        job = of_steps(make_job, steps)
    registry, rule = Registry(job.runs), rule_of(job)
    assert [steps_of(version.folder) for version in registry.versions(rule)] == [1, 2, 3]
    (job.folder / PEFT_WEIGHTS).write_bytes(b"torn")
    of_steps(make_job, 4)
    assert [steps_of(version.folder) for version in registry.versions(rule)] == [1, 2, 3, 4]
    champion = registry.champions(rule.model, rule.method)[rule.rule]
    assert steps_of(champion) == 1
    toys.finish_at_once(replace(job, seed=1))
    toys.finish_at_once(replace(job, of_study=True))
    assert len(registry.versions(rule)) == 4


FLAGGED = {"test": {"twins": {"n": 90, "fpr": 0.5, "fpr_ci95": [0.4, 0.6]}}}
WORSE = {"day_zero": {"loss_above_reader": 0.2, "loss_above_reader_ci95": [0.1, 0.3]}}


def test_the_first_weights_replace_a_version_zero_unless_the_rule_asks_for_more(
    make_job: toys.MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job, rates = of_steps(make_job, 1), "it flags 0.500 [0.400, 0.600] of twins"
    card = load_card(job.folder).model_copy(update={"metrics": FLAGGED})
    card.save(job.folder)
    zero = card_of_reader(card, job.rule.id, "By the reader.")
    for stated, told in (
        ({"max_fpr_twins": 0.45}, ""),
        ({"max_fpr_twins": 0.3}, f"{rates}, max_fpr_twins 0.3: make publish"),
        ({"approvals": 2}, "it needs 2 approvals: make publish"),
    ):
        registry = Registry(job.runs)
        shutil.rmtree(registry.root, ignore_errors=True)
        registry.register_zero(zero, job.folder, actor="ann", note="")
        register(toys.with_rule(job, **stated), job.folder, "trained")
        champion = registry.aliases(rule_of(job))["champion"]
        assert champion == (zero.version if told else card.version)
        assert told in capsys.readouterr().out


def test_a_reader_judges_instead_of_worse_weights_of_its_own_method_alone(
    make_job: toys.MakeJob, tmp_path: Path
) -> None:
    job = of_steps(make_job, 1)
    reader = Path(shutil.copytree(job.folder, tmp_path / "reader"))
    card = load_card(job.folder)
    card.model_copy(update={"method": "alora"}).save(reader)
    card.model_copy(update={"metrics": WORSE}).save(job.folder)
    register(toys.with_recipe(job, reader=str(reader)), job.folder, "trained")
    assert Registry(job.runs).rules() == [rule_of(job)]


def test_what_another_program_wrote_is_kept_beside(make_job: toys.MakeJob) -> None:
    job = of_steps(make_job, 1)
    card = json.loads((job.folder / CARD).read_text())
    (job.folder / CARD).write_text(json.dumps(card | {"of_another_version": 1}))
    of_steps(make_job, 2)
    older = job.folder.with_name(f"{job.folder.name}.older") / CARD
    assert json.loads(older.read_text())["of_another_version"] == 1
    assert steps_of(job.folder) == 2


def test_weights_of_before_there_was_a_registry_are_kept_too(make_job: toys.MakeJob) -> None:
    job = of_steps(make_job, 1)
    registry = Registry(job.runs)
    shutil.rmtree(registry.root)
    of_steps(make_job, 2)
    assert [steps_of(version.folder) for version in registry.versions(rule_of(job))] == [1, 2]


def test_an_older_adapter_is_replaced_whole_or_not_at_all(make_job: toys.MakeJob) -> None:
    job = make_job()
    job.folder.mkdir(parents=True)
    (job.folder / "left_over.txt").write_text("of an older version")
    toys.finish_at_once(job)
    assert not (job.folder / "left_over.txt").exists()
    stamp = (job.folder / "stage.json").read_bytes()
    rows = toys.data(job)
    broken = [("test-0", "test", object())]
    with pytest.raises(TypeError, match="not JSON serializable"):
        export(job, toys.RankedWeights(rows), broken, Calibration(), METRICS, None)  # type: ignore[arg-type]
    assert (job.folder / "stage.json").read_bytes() == stamp


def test_every_method_has_a_trainer_and_no_other_name_has() -> None:
    assert set(TRAINERS) == set(KINDS)
    for kind, trainers in TRAINERS.items():
        assert set(trainers) == {
            name for name, method in METHODS.items() if method.acts_from in KINDS[kind].acts_from
        }


def test_of_adapters_an_alora_alone_takes_settings_of_a_head(make_job: toys.MakeJob) -> None:
    job, recipe = make_job(), load_recipe("tiny")
    for method in recipe.methods:
        tiny = Job(job.rule, recipe, method, 0, job.builder, job.runs)
        trainer_of(tiny).check(tiny)
    TRAINERS["decoder"]["alora"].check(toys.with_settings(make_job("alora"), head={"C": 1.0}))
    for method, head, told in (
        ("lora", {"C": 1.0}, r"methods\.lora\.head: only an aLoRA and a method that is a head"),
        ("alora", {"c": 1.0}, r"methods\.alora\.head: unknown key 'c'"),
    ):
        with pytest.raises(GuardError, match=told):
            TRAINERS["decoder"][method].check(toys.with_settings(make_job(method), head=head))
