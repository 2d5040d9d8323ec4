"""The whole stage: learn, calibrate, export, skip, refuse, resume."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml
from pytest import CaptureFixture, MonkeyPatch
from safetensors import SafetensorError

from guard.calibrate import calibrate
from guard.conversation.example import GENERATOR, read_examples, write_examples
from guard.conversation.labelling import MANIFEST_KEY
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import is_current
from guard.method import PEFT_CONFIG, PEFT_WEIGHTS, WORDS
from guard.weights.card import CARD, load_card, read_card
from guard.weights.predictions import read_predictions
from tests.train.conftest import (
    ADAPTERS,
    RULE,
    MakeJob,
    RankedWeights,
    calls_of,
    data,
    finish_at_once,
)
from train import run as train_run
from train.adapter.trl import VerdictTrainer, whole_checkpoint
from train.calibrate import recalibrate
from train.job import LOCK, Job
from train.methods import TRAINERS, TrainingWork
from train.prefix.member import CHECKPOINT, Member
from train.run import claimed_jobs, finish, outdated_jobs, run, see_one_gpu
from train.run import train as train_work

TRAIN = """
import sys
from pathlib import Path
from guard.layout import Runs
from guard.recipe import load_recipe
from train.run import run

folder, runs, method = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
run("toy", load_recipe("toy", folder / "models"), methods=[method], runs=Runs(runs), rules=folder)
print("torch" in sys.modules)
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(RULE.model_dump(mode="json")))
    return tmp_path


def train(job: Job, rules: Path, *, seeds: Sequence[int] = (0,), force: bool = False) -> None:
    run(
        "toy",
        job.recipe,
        methods=[job.method],
        seeds=seeds,
        force=force,
        runs=job.runs,
        rules=rules,
    )


def command(job: Job, rules: Path) -> list[str]:
    """Trains the job in a process of its own."""
    models = rules / "models"
    models.mkdir()
    (models / "toy.yaml").write_text(yaml.safe_dump(job.recipe.model_dump(mode="json")))
    return [sys.executable, "-c", TRAIN, str(rules), str(job.runs.root), job.method]


@pytest.fixture
def at_once(monkeypatch: MonkeyPatch) -> list[str]:
    """Adapters are there without training; the names of those that were asked for."""
    asked: list[str] = []

    def fit(work: TrainingWork) -> Iterator[RankedWeights]:
        for job, rows in work:
            asked.append(job.name)
            yield RankedWeights(rows)

    for method in ADAPTERS:
        trainer = replace(TRAINERS["decoder"][method], fit=fit)
        monkeypatch.setitem(TRAINERS["decoder"], method, trainer)
    return asked


@pytest.mark.parametrize("training_has_computed_them", [False, True])
def test_validation_rows_calibrate(make_job: MakeJob, training_has_computed_them: bool) -> None:
    job = make_job()
    rows = data(job)
    trained = RankedWeights(rows)
    validation = trained.logits([row.prompt for row in rows.validation])
    if training_has_computed_them:
        trained.validation_logits = validation
    metrics = finish(job, rows, trained)
    assert (metrics["n"], metrics["accuracy"], metrics["auroc"]) == (32, 1.0, 1.0)
    calibration = calibrate(validation, [row.label for row in rows.validation])
    card = load_card(job.folder)
    assert card.coverage is not None
    assert (card.coverage.sure_logit, card.coverage.sure_logit_long) == (3.0, 3.0)
    assert card.calibration == replace(calibration, coverage=card.coverage)
    assert card.metrics == {"validation": metrics}
    for split, of_split in (("validation", rows.validation), ("test", rows.test)):
        logits = trained.logits([row.prompt for row in of_split])
        expected = dict(zip([row.id for row in of_split], logits, strict=True))
        assert read_predictions(job.folder, split, "") == expected


def test_a_logit_that_is_not_finite_is_named(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    job = make_job()
    rows = data(job)
    logits = RankedWeights.logits
    monkeypatch.setattr(
        RankedWeights, "logits", lambda self, prompts: [*logits(self, prompts)[:-1], float("nan")]
    )
    told = r"test row test-31: verdict logits are not finite \(got 1 of 32 rows in float32\)"
    with pytest.raises(GuardError, match=told):
        finish(job, rows, RankedWeights(rows))
    assert not job.folder.exists()


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise error

    return fail


NO_MEMORY = "the device has no memory for this training: .*Drop the longest rows"
NO_DISK = "not written: .*No space left.*See that .* can be written"


@pytest.mark.parametrize(
    ("asked", "fails", "told"),
    [
        ("logits", lambda _: torch.empty(2**60), NO_MEMORY),
        ("logits", raising(torch.OutOfMemoryError("CUDA out of memory")), NO_MEMORY),
        ("save", lambda _: Path("/dev/full").write_bytes(b"weights"), NO_DISK),
        ("save", raising(SafetensorError("I/O error: No space left on device")), NO_DISK),
    ],
)
def test_one_of_several_trained_together_that_cannot_be_finished_keeps_no_other(
    make_job: MakeJob,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
    asked: str,
    fails: Callable[..., Any],
    told: str,
) -> None:
    def fit(work: TrainingWork) -> Iterator[RankedWeights]:
        for job, rows in work:
            trained = RankedWeights(rows)
            if job.seed == 1:
                setattr(trained, asked, fails)
            yield trained

    together = replace(TRAINERS["decoder"]["alora"], fit=fit)
    monkeypatch.setitem(TRAINERS["decoder"], "alora", together)
    jobs = [make_job("alora", seed=seed) for seed in range(3)]
    assert train_work([(job, data(job)) for job in jobs]) == ["toy alora seed 1"]
    assert re.search(f"^toy alora seed 1: .*{told}", capsys.readouterr().out, re.MULTILINE)
    assert [is_current(job.folder, job.inputs) for job in jobs] == [True, False, True]


def test_weights_are_calibrated_on_own_rows_at_any_rate(make_job: MakeJob) -> None:
    job = make_job()
    file = job.data / "validation.jsonl"
    examples = read_examples(file)
    generated = [replace(row, source=GENERATOR) for row in examples[:12]]
    write_examples(file, [*generated, *examples[12:]])
    rows = data(job)
    metrics = finish(job, rows, RankedWeights(rows))
    assert (metrics["n"], metrics["accuracy"]) == (20, 1.0)
    assert len(read_predictions(job.folder, "validation", "")) == 32
    calibration = read_card(job.folder).calibration
    for max_fpr in (0.1, None):
        at_rate = replace(job, rule=job.rule.model_copy(update={"max_fpr": max_fpr}))
        assert recalibrate(at_rate) == 20
        assert read_card(job.folder).metrics["validation"]["n"] == 20
    for_all_rows = job.rule.model_copy(update={"max_fpr": 0.07})
    with pytest.raises(GuardError, match=r"selects other validation rows.*0\.07.*FORCE=1"):
        head = replace(job, method="head", rule=for_all_rows)
        shutil.copytree(job.folder, head.folder)
        recalibrate(head)
    assert read_card(job.folder).calibration == calibration
    assert recalibrate(replace(job, rule=for_all_rows)) == 32


@pytest.mark.slow
@pytest.mark.parametrize("method", ADAPTERS)
def test_one_command_learns_a_rule_that_one_word_decides(
    make_job: MakeJob, rules: Path, method: str, capsys: CaptureFixture[str]
) -> None:
    job = make_job(method, n_train=128, learning_rate=3e-3)
    train(job, rules)
    card = load_card(job.folder)
    assert is_current(job.folder, job.inputs) and not job.scratch.exists()
    assert card.metrics["validation"]["accuracy_ci95"][0] > 0.7
    lines = (job.folder / "predictions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    expected = [(f"{split}-{i}", split) for split in ("validation", "test") for i in range(32)]
    assert [(row["id"], row["split"]) for row in rows] == expected
    right = 0
    for index, row in enumerate(rows[32:]):
        right += card.calibration.verdict("toy", row["logit"]).violates == bool(index % 2)
    assert right >= 26
    assert "validation accuracy" in capsys.readouterr().out


def test_finished_weights_are_made_again_only_if_inputs_changed_or_by_force(
    make_job: MakeJob,
    rules: Path,
    at_once: list[str],
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    """A busy machine is told before training alone; a process with nothing to do loads no torch."""
    told: list[str] = []
    monkeypatch.setattr("train.run.warn_if_busy", told.append)
    job = make_job()
    train(job, rules)
    assert at_once == [job.name] and told == ["training may take several times as long"]
    capsys.readouterr()
    train(job, rules)
    assert capsys.readouterr().out == "toy lora seed 0: up to date\n"
    done = subprocess.run(command(job, rules), cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "toy lora seed 0: up to date\nFalse\n"
    assert len(at_once) == len(told) == 1
    train(job, rules, force=True)
    train(make_job(max_steps=2), rules)
    assert at_once == [job.name] * 3 and len(told) == 3
    with pytest.raises(GuardError, match="unknown key"):
        train(make_job(max_step=1), rules, force=True)
    changed = make_job(max_steps=2)
    assert is_current(changed.folder, changed.inputs)


def test_bad_data_of_one_rule_is_told_before_any_training_and_leaves_the_others_to_be_trained(
    make_job: MakeJob, rules: Path, at_once: list[str], capsys: CaptureFixture[str]
) -> None:
    job = make_job()
    for name in ("relabelled", "untold"):
        rule = RULE.model_dump(mode="json") | {"id": name}
        (rules / f"{name}.yaml").write_text(yaml.safe_dump(rule))
    relabelled = job.runs.data("relabelled")
    shutil.copytree(job.data, relabelled)
    (relabelled / "manifest.json").write_text(json.dumps({MANIFEST_KEY: {"turns": "last"}}))
    (rules / "broken.yaml").write_text("id: broken")
    with pytest.raises(GuardError, match="not trained: broken, relabelled, untold"):
        run("all", job.recipe, methods=["lora"], runs=job.runs, rules=rules)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("broken: ") and "broken.yaml" in told[0]
    assert 'the rows of relabelled were made for turns: "last"' in told[1]
    assert told[2].startswith("untold: ") and "make data" in told[2]
    assert told[3] == "toy lora seed 0: training"
    assert is_current(job.folder, job.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ADAPTERS)
def test_a_run_killed_in_its_second_epoch_resumes_to_the_weights_of_an_uninterrupted_one(
    make_job: MakeJob, rules: Path, method: str, monkeypatch: MonkeyPatch
) -> None:
    job = make_job(method, num_train_epochs=3)  # 8 steps an epoch, a checkpoint every 5
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(job, rules), cwd=ROOT, **quiet)  # type: ignore[call-overload]
    try:
        deadline = time.monotonic() + 300
        while resumable_step(job) < 10:
            assert process.poll() is None, "ended before its second epoch"
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not job.folder.exists()

    done = resumable_step(job)
    steps = calls_of(monkeypatch, VerdictTrainer, "training_step")
    updates = calls_of(monkeypatch, Member, "update")
    train(job, rules)
    assert len(steps) + len(updates) == 24 - done
    whole = make_job(method, num_train_epochs=3, runs="whole")
    train(whole, rules)
    assert (job.folder / PEFT_WEIGHTS).read_bytes() == (whole.folder / PEFT_WEIGHTS).read_bytes()


def resumable_step(job: Job) -> int:
    """The last step that an interrupted run would not do again."""
    if (job.scratch / CHECKPOINT).is_file():
        return int(torch.load(job.scratch / CHECKPOINT, weights_only=True)["step"])
    last = whole_checkpoint(job.scratch) if job.scratch.is_dir() else None
    return int(last.rsplit("-", 1)[1]) if last else 0


@pytest.mark.parametrize("method", ADAPTERS)
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (GuardError("the loss is NaN or infinite"), "the loss is NaN or infinite"),
        (torch.OutOfMemoryError("CUDA out of memory"), NO_MEMORY),
        (MemoryError(), NO_MEMORY),
    ],
)
def test_weights_that_fail_in_training_are_named_at_the_end_and_keep_no_others(
    make_job: MakeJob,
    rules: Path,
    at_once: list[str],
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
    method: str,
    error: Exception,
    told: str,
) -> None:
    """Those of seed 1: what was trained before them and what is trained apart from them stays."""
    trainer = TRAINERS["decoder"][method]

    def fit(work: TrainingWork) -> Iterator[Any]:
        yield from trainer.fit([(job, rows) for job, rows in work if job.seed == 0])
        if work[-1][0].seed == 1:
            raise error

    monkeypatch.setitem(TRAINERS["decoder"], method, replace(trainer, fit=fit))
    job = make_job()
    with pytest.raises(GuardError, match=f"not trained: toy {method} seed 1"):
        run("toy", job.recipe, seeds=[0, 1], runs=job.runs, rules=rules)
    assert re.search(f"^toy {method} seed 1: .*{told}", capsys.readouterr().out, re.MULTILINE)
    made = {path.name for path in job.folder.parent.iterdir() if not path.name.startswith(".")}
    assert made == {"lora", "alora", "lora-seed1", "alora-seed1"} - {f"{method}-seed1"}


def test_a_job_that_its_trainer_gives_up_on_leaves_its_neighbours(
    make_job: MakeJob, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    def fit(work: TrainingWork) -> Iterator[Any]:
        for job, rows in work:
            yield RankedWeights(rows) if job.seed else GuardError("it diverged")

    together = replace(TRAINERS["decoder"]["alora"], fit=fit)
    monkeypatch.setitem(TRAINERS["decoder"], "alora", together)
    jobs = [make_job("alora", seed=seed) for seed in (0, 1)]
    assert train_work([(job, data(job)) for job in jobs]) == ["toy alora seed 0"]
    assert "toy alora seed 0: it diverged" in capsys.readouterr().out
    assert load_card(jobs[1].folder)


def test_an_error_of_our_own_is_raised(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    failing = replace(TRAINERS["decoder"]["lora"], fit=raising(RuntimeError("a bug")))
    monkeypatch.setitem(TRAINERS["decoder"], "lora", failing)
    job = make_job()
    monkeypatch.setattr(RankedWeights, "save", raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        finish_at_once(job)
    with pytest.raises(RuntimeError, match="a bug"):
        train_work([(job, data(job))])


@pytest.mark.parametrize(
    ("trainer", "lora", "told"),
    [
        ({"num_epochs": 1}, {}, "unknown key 'num_epochs'"),
        ({}, {"target_modules": ["q_prj"]}, r"methods\.lora\.lora.*q_prj"),
    ],
)
def test_a_bad_recipe_stops_the_command_before_anything_is_trained(
    make_job: MakeJob, rules: Path, trainer: dict[str, object], lora: dict[str, object], told: str
) -> None:
    job = make_job(**trainer)
    changed = job.recipe.methods["lora"]
    changed = changed.model_copy(update={"lora": changed.lora | lora})
    recipe = job.recipe.model_copy(update={"methods": job.recipe.methods | {"lora": changed}})
    with pytest.raises(GuardError, match=told):
        run("toy", recipe, runs=job.runs, rules=rules)
    assert not job.folder.parent.exists()


def test_an_adapter_that_another_command_trains_is_left_to_it(
    make_job: MakeJob, rules: Path, at_once: list[str], capsys: CaptureFixture[str]
) -> None:
    job = make_job()
    job.scratch.mkdir(parents=True)
    with (job.scratch / LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(GuardError, match="not trained: toy lora seed 0"):
            train(job, rules, seeds=[0, 1])
    assert "another command is training this" in capsys.readouterr().out
    assert [path.name for path in sorted(job.folder.parent.glob("lora*"))] == ["lora-seed1"]


def test_the_rows_of_a_rule_are_read_once_for_all_its_adapters(
    make_job: MakeJob, rules: Path, at_once: list[str], monkeypatch: MonkeyPatch
) -> None:
    job = make_job()
    read = calls_of(monkeypatch, train_run, "load")
    run("toy", job.recipe, seeds=[0, 1], runs=job.runs, rules=rules)
    assert len(read) == 1 and len(at_once) == 4


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        (PEFT_WEIGHTS, b"weig", "the weights are not those of the card"),
        (PEFT_WEIGHTS, None, f"no {PEFT_WEIGHTS}"),
        (WORDS, None, "the weights are not those of the card"),
        (CARD, None, f"{CARD} cannot be read"),
        (CARD, b"{", f"{CARD} cannot be read"),
        (PEFT_CONFIG, b'{"lora_alpha": 1}', "adapter_config.json is another file"),
        (PEFT_CONFIG, None, f"no {PEFT_CONFIG}"),
    ],
)
def test_weights_that_are_missing_or_torn_are_trained_again(
    make_job: MakeJob, capsys: CaptureFixture[str], file: str, content: bytes | None, why: str
) -> None:
    job = make_job()
    finish_at_once(job)
    assert outdated_jobs([job], force=False) == ([], [])
    (job.folder / file).unlink()
    if content is not None:
        (job.folder / file).write_bytes(content)
    capsys.readouterr()
    outdated, failed = outdated_jobs([job], force=False)
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith(f"{job.name}: to be trained again: ") and why in told
    claimed, taken = claimed_jobs(outdated, force=False)
    assert [of for of, _ in claimed] == [job] and failed == taken == []
    finish_at_once(job)
    assert outdated_jobs([job], force=False) == ([], [])


def test_an_edited_card_is_trained_again(make_job: MakeJob, capsys: CaptureFixture[str]) -> None:
    job = make_job()
    finish_at_once(job)
    content = json.loads((job.folder / CARD).read_text())
    (job.folder / CARD).write_text(json.dumps(content | {"threshold": 0.99}))
    outdated, failed = outdated_jobs([job], force=False)
    assert [of for of, _ in outdated] == [job] and failed == []
    assert "to be trained again: the card was edited" in capsys.readouterr().out
    (job.folder / CARD).write_bytes(b'{"rule": "toy"}')
    assert outdated_jobs([job], force=False) == ([], [job.name])
    out = capsys.readouterr().out
    assert "missing key" in out and "`make train` for this rule, with FORCE=1" in out


def test_a_job_done_meanwhile_stays_done(make_job: MakeJob, capsys: CaptureFixture[str]) -> None:
    job, other = make_job(), make_job("alora")
    work, _ = outdated_jobs([job, other], force=False)
    finish_at_once(job)
    assert claimed_jobs(work, force=False) == ([work[1]], [])
    assert capsys.readouterr().out == "toy lora seed 0: up to date\n"
    assert not job.scratch.exists()
    job.claim()  # nothing holds it
    job.close_scratch()
    claimed, _ = claimed_jobs(work, force=True)
    assert claimed == work and not is_current(job.folder, job.inputs)
    for claimed_job in (job, other):
        claimed_job.close_scratch()


def test_weights_written_whole_are_kept(make_job: MakeJob, capsys: CaptureFixture[str]) -> None:
    job = make_job()
    finish_at_once(job)
    job.scratch.mkdir()
    job.folder.rename(job.scratch / "export")
    work, _ = outdated_jobs([job], force=False)
    assert [of for of, _ in work] == [job]
    assert claimed_jobs(work, force=False) == ([], [])
    assert capsys.readouterr().out == "toy lora seed 0: up to date\n"
    assert load_card(job.folder) and not job.scratch.exists()


def test_data_that_change_while_a_job_waits_make_its_weights_outdated(make_job: MakeJob) -> None:
    """With FORCE=1 too, where nothing else asks what the data are before its turn comes."""
    job = make_job(max_steps=1)
    for force in (True, False):
        waiting = replace(job)
        ((queued, _),), failed = outdated_jobs([waiting], force=force)
        assert failed == []
        test = job.data / "test.jsonl"
        test.write_text("".join(reversed(test.read_text().splitlines(keepends=True))))
        later = replace(job)
        assert queued.inputs != later.inputs and queued.test_sha256 != later.test_sha256


@pytest.mark.parametrize(
    ("gpus", "named", "seen"), [(0, None, None), (4, None, "0"), (4, "3,5", "3"), (4, "", "")]
)
def test_of_several_gpus_the_first_is_seen(
    monkeypatch: MonkeyPatch, gpus: int, named: str | None, seen: str | None
) -> None:
    monkeypatch.setattr("train.run.gpus", lambda: ["H200"] * gpus)
    environment = {"HOME": "/"} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    see_one_gpu(environment)
    assert environment.get("CUDA_VISIBLE_DEVICES") == seen


def test_processes_of_a_launcher_which_would_all_train_the_same_are_refused() -> None:
    see_one_gpu({"WORLD_SIZE": "1"})
    with pytest.raises(GuardError, match=r"got WORLD_SIZE=2.*one command a GPU"):
        see_one_gpu({"WORLD_SIZE": "2", "RANK": "1"})
