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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import SafetensorError

from guard.calibrate import calibrate
from guard.conversation.example import GENERATOR, SPLITS, read_examples, write_examples
from guard.conversation.labelling import MANIFEST_KEY
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import is_current
from guard.method import PEFT_CONFIG, PEFT_WEIGHTS, WORDS
from guard.prompt.decoder import Prompt
from guard.weights.card import CARD, load_card, read_card
from guard.weights.predictions import read_predictions
from tests.train.conftest import ADAPTERS, RULE, MakeJob
from train.adapter.trained import TrainedAdapter
from train.adapter.trl import VerdictTrainer, whole_checkpoint
from train.calibration.recalibrate import recalibrate
from train.examples import Rows, load
from train.job import LOCK, Job
from train.methods import TRAINERS, TrainingWork
from train.prefix.member import CHECKPOINT, Member
from train.process import Process
from train.run import claimed_jobs, finish, outdated_jobs, run
from train.run import train as train_work

TRAIN = """
import sys
from pathlib import Path
from guard.layout import Runs
from guard.recipe import load_recipe
from train.run import finish, run

folder, method = Path(sys.argv[1]), sys.argv[2]
run("toy", load_recipe("toy", folder), methods=[method], runs=Runs(folder / "runs"), rules=folder)
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(RULE.model_dump(mode="json")))
    return tmp_path


def train(job: Job, rules: Path, *, force: bool = False) -> None:
    run(
        "toy",
        job.recipe,
        methods=[job.method],
        seeds=[job.seed],
        force=force,
        runs=job.runs,
        rules=rules,
    )


def counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with each training step of this process."""
    steps: list[object] = []
    for owner, name in ((VerdictTrainer, "training_step"), (Member, "update")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *args, original=original, **kwargs: (
                steps.append(None),
                original(*args, **kwargs),
            )[1],
        )
    return steps


def resumable_step(job: Job) -> int:
    """The last step that an interrupted run would not do again."""
    if (job.scratch / CHECKPOINT).is_file():
        return int(torch.load(job.scratch / CHECKPOINT, weights_only=True)["step"])
    last = whole_checkpoint(job.scratch) if job.scratch.is_dir() else None
    return int(last.rsplit("-", 1)[1]) if last else 0


@dataclass
class SplitLogits:
    """Weights that rank the validation rows perfectly and the test rows upside down."""

    rows: Rows
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        signs = {id(row.prompt): 2 * row.label - 1 for row in self.rows.validation}
        signs |= {id(row.prompt): 1 - 2 * row.label for row in self.rows.test}
        # Others are of violating validation rows with a long turn.
        return [3.0 * signs.get(id(prompt), 1) for prompt in prompts]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / PEFT_WEIGHTS).write_bytes(b"weights")
        (folder / PEFT_CONFIG).write_text("{}")


@dataclass
class WithWords(SplitLogits):
    """Weights that have words beside them."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / WORDS).write_bytes(b"words")


@dataclass
class WithoutMemory(SplitLogits):
    """Weights whose rows ask for more memory than there is."""

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        return torch.empty(2**60).tolist()  # type: ignore[no-any-return]


@dataclass
class WithoutGpuMemory(SplitLogits):
    """The same as a GPU says it."""

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        raise torch.OutOfMemoryError("CUDA out of memory")


@dataclass
class WithoutDisk(SplitLogits):
    """Weights for which the disk has no room."""

    def save(self, folder: Path) -> None:
        Path("/dev/full").write_bytes(b"weights")


@dataclass
class WithoutDiskForTensors(SplitLogits):
    """The same as safetensors says it."""

    def save(self, folder: Path) -> None:
        raise SafetensorError("I/O error: No space left on device")


@dataclass
class WithOneNan(SplitLogits):
    """Weights that say nothing of the last row."""

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        return [*super().logits(prompts)[:-1], float("nan")]


def finish_at_once(job: Job) -> None:
    """Put such weights where the job's belong."""
    rows = load(job.data, job.rule, job.recipe, job.builder)
    finish(job, rows, WithWords(rows))


@pytest.mark.parametrize("training_has_computed_them", [False, True])
def test_weights_are_calibrated_and_measured_on_the_validation_rows_alone(
    make_job: MakeJob, training_has_computed_them: bool
) -> None:
    job = make_job()
    rows = load(job.data, job.rule, job.recipe, job.builder)
    trained = SplitLogits(rows)
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
        kept = read_predictions(job.folder, split, "")
        assert kept == {
            row.id: logit
            for row, logit in zip(
                of_split, trained.logits([row.prompt for row in of_split]), strict=True
            )
        }


def test_a_test_row_whose_logit_is_not_finite_is_named_and_nothing_is_written(
    make_job: MakeJob,
) -> None:
    job = make_job()
    rows = load(job.data, job.rule, job.recipe, job.builder)
    told = r"test row test-31: verdict logits are not finite \(got 1 of 32 rows in float32\)"
    with pytest.raises(GuardError, match=told):
        finish(job, rows, WithOneNan(rows))
    assert not job.folder.exists()


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        (WithoutMemory, "the device has no memory for this training: .*Drop the longest rows"),
        (WithoutGpuMemory, "the device has no memory for this training: CUDA out of memory"),
        (WithoutDisk, "not written: .*No space left.*See that .* can be written"),
        (WithoutDiskForTensors, "not written: .*No space left.*See that .* can be written"),
    ],
)
def test_one_of_several_trained_together_that_cannot_be_finished_keeps_no_other(
    make_job: MakeJob,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    weights: type[SplitLogits],
    told: str,
) -> None:
    def fit(work: TrainingWork, processes: int) -> Iterator[SplitLogits]:
        for job, rows in work:
            yield weights(rows) if job.seed == 1 else SplitLogits(rows)

    together = replace(TRAINERS["decoder"]["alora"], fit=fit)
    monkeypatch.setitem(TRAINERS["decoder"], "alora", together)
    jobs = [make_job("alora", seed=seed) for seed in range(3)]
    work = [(job, load(job.data, job.rule, job.recipe, job.builder)) for job in jobs]
    assert train_work(work) == ["toy alora seed 1"]
    assert re.search(f"^toy alora seed 1: .*{told}", capsys.readouterr().out, re.MULTILINE)
    assert [is_current(job.folder, job.inputs) for job in jobs] == [True, False, True]


def test_beside_generated_rows_weights_are_calibrated_on_the_others_now_and_at_another_rate(
    make_job: MakeJob,
) -> None:
    job = make_job()
    file = job.data / "validation.jsonl"
    examples = read_examples(file)
    generated = [replace(row, source=GENERATOR) for row in examples[:12]]
    write_examples(file, [*generated, *examples[12:]])
    rows = load(job.data, job.rule, job.recipe, job.builder)
    metrics = finish(job, rows, SplitLogits(rows))
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
    make_job: MakeJob, rules: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(method, n_train=128, learning_rate=3e-3)
    train(job, rules)
    card = load_card(job.folder)
    assert is_current(job.folder, job.inputs)
    assert card.metrics["validation"]["accuracy_ci95"][0] > 0.7
    rows = [
        json.loads(line) for line in (job.folder / "predictions.jsonl").read_text().splitlines()
    ]
    assert [(row["id"], row["split"]) for row in rows] == [
        (f"{s}-{i}", s) for s in ("validation", "test") for i in range(32)
    ]
    violates = [
        card.calibration.verdict("toy", row["logit"]).violates
        for row in rows
        if row["split"] == "test"
    ]
    assert sum(verdict == bool(index % 2) for index, verdict in enumerate(violates)) >= 26
    assert not job.scratch.exists()
    assert "validation accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_a_finished_adapter_is_trained_again_only_if_its_inputs_changed_or_it_is_forced(
    make_job: MakeJob, rules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(max_steps=1)
    train(job, rules)
    written = (job.folder / PEFT_WEIGHTS).stat().st_mtime_ns
    capsys.readouterr()
    train(job, rules)
    assert capsys.readouterr().out == "toy lora seed 0: up to date\n"
    assert (job.folder / PEFT_WEIGHTS).stat().st_mtime_ns == written
    train(job, rules, force=True)
    assert (job.folder / PEFT_WEIGHTS).stat().st_mtime_ns > written
    capsys.readouterr()
    train(make_job(max_steps=2), rules)
    assert "up to date" not in capsys.readouterr().out


def test_rows_that_were_labelled_for_what_the_rule_was_before_are_not_trained_on(
    make_job: MakeJob, rules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(max_steps=1)
    (job.data / "manifest.json").write_text(json.dumps({MANIFEST_KEY: {"turns": "last"}}))
    with pytest.raises(GuardError, match="not trained: toy"):
        train(job, rules)
    assert 'the rows of toy were made for turns: "last"' in capsys.readouterr().out


@pytest.mark.slow
def test_a_busy_machine_is_told_once_before_training_and_not_where_nothing_is_to_be_done(
    make_job: MakeJob, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("alora", max_steps=1)
    told: list[str] = []
    monkeypatch.setattr("train.run.warn_if_busy", told.append)
    several = Process(0, 2)  # which would be told of each other
    run("toy", job.recipe, methods=["alora"], runs=job.runs, rules=rules, process=several)
    assert told == [] and job.folder.exists()
    train(job, rules, force=True)
    assert told == ["training may take several times as long"]
    train(job, rules)
    assert len(told) == 1


@pytest.mark.slow
def test_a_run_with_nothing_to_do_does_not_load_torch(make_job: MakeJob, rules: Path) -> None:
    job = make_job("alora", max_steps=1)
    train(job, rules)
    models = rules / "idle"
    models.mkdir()
    (models / "toy.yaml").write_text(yaml.safe_dump(job.recipe.model_dump(mode="json")))
    (models / "runs").symlink_to(job.runs.root)
    script = (
        TRAIN.replace("rules=folder)", f"rules=Path({str(rules)!r}))")
        + "\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(models), "alora"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "toy alora seed 0: up to date\nFalse\n"


@pytest.mark.slow
def test_bad_data_of_one_rule_is_told_before_any_training_and_leaves_the_others_to_be_trained(
    make_job: MakeJob, rules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(max_steps=1)
    (rules / "untold.yaml").write_text(
        yaml.safe_dump(RULE.model_dump(mode="json") | {"id": "untold"})
    )
    (rules / "broken.yaml").write_text("id: broken")
    with pytest.raises(GuardError, match="not trained: broken, untold"):
        run("all", job.recipe, methods=["lora"], runs=job.runs, rules=rules)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("broken: ") and "broken.yaml" in told[0]
    assert told[1].startswith("untold: ")
    assert "make data" in told[1]
    assert told[2] == "toy lora seed 0: training"
    assert is_current(job.folder, job.inputs)


@pytest.mark.slow
def test_a_bad_recipe_stops_the_command_before_anything_is_trained(
    make_job: MakeJob, rules: Path
) -> None:
    job = make_job(num_epochs=1)
    with pytest.raises(GuardError, match="unknown key 'num_epochs'"):
        train(job, rules)
    assert not job.scratch.exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", ADAPTERS)
def test_a_run_killed_in_its_second_epoch_resumes_to_the_weights_of_an_uninterrupted_one(
    make_job: MakeJob, rules: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(method, num_train_epochs=3)  # 8 steps an epoch, a checkpoint every 5
    models = rules / "killed"
    models.mkdir()
    (models / "toy.yaml").write_text(yaml.safe_dump(job.recipe.model_dump(mode="json")))
    script = TRAIN.replace("rules=folder)", f"rules=Path({str(rules)!r}))")
    (models / "runs").symlink_to(job.runs.root)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(models), method],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
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

    done, steps = resumable_step(job), counted_steps(monkeypatch)
    train(job, rules)
    assert len(steps) == 24 - done
    whole = make_job(method, num_train_epochs=3, runs="whole")
    train(whole, rules)
    assert (job.folder / PEFT_WEIGHTS).read_bytes() == (whole.folder / PEFT_WEIGHTS).read_bytes()


@pytest.mark.slow
def test_an_adapter_that_diverges_does_not_keep_the_next_from_being_written(
    make_job: MakeJob,
    rules: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = make_job("alora", max_steps=2)
    update = Member.update
    monkeypatch.setattr(
        Member,
        "update",
        lambda member, loss: update(member, loss if member.job.seed else float("nan")),
    )
    with pytest.raises(GuardError, match="not trained: toy alora seed 0"):
        run("toy", job.recipe, seeds=[0, 1], runs=job.runs, rules=rules)
    assert "Lower the learning rate" in capsys.readouterr().out
    made = sorted(
        path.name for path in job.folder.parent.iterdir() if not path.name.startswith(".")
    )
    assert made == ["alora-seed1", "lora", "lora-seed1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_memory", "error"),
    [
        (True, "toy lora seed 0, step 1: the loss is NaN or infinite"),
        (False, "toy lora seed 0: the device has no memory for this training: CUDA out of memory"),
    ],
)
def test_a_lora_that_fails_in_training_is_named_at_the_end_and_keeps_no_other(
    make_job: MakeJob,
    rules: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    has_memory: bool,
    error: str,
) -> None:
    job = make_job(max_steps=2)
    compute = VerdictTrainer.compute_loss

    def fails_of_seed_0(self: VerdictTrainer, *args: Any, **more: Any) -> Any:
        if self.args.seed:
            return compute(self, *args, **more)
        if has_memory:
            return compute(self, *args, **more) * float("nan")
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(VerdictTrainer, "compute_loss", fails_of_seed_0)
    with pytest.raises(GuardError, match="not trained: toy lora seed 0"):
        run("toy", job.recipe, methods=["lora"], seeds=[0, 1], runs=job.runs, rules=rules)
    assert error in capsys.readouterr().out
    assert [path.name for path in sorted(job.folder.parent.glob("lora*"))] == ["lora-seed1"]


@pytest.mark.slow
def test_a_lora_that_finds_no_memory_for_its_test_rows_is_not_trained(
    make_job: MakeJob,
    rules: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = make_job(max_steps=2)

    def without_memory(*_: object) -> list[float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TrainedAdapter, "logits", without_memory)
    with pytest.raises(GuardError, match="not trained: toy lora seed 0"):
        run("toy", job.recipe, methods=["lora"], seeds=[0], runs=job.runs, rules=rules)
    out = capsys.readouterr().out
    assert "toy lora seed 0: the device has no memory" in out and "Drop the longest rows" in out


@pytest.mark.slow
def test_a_base_that_cannot_be_trained_on_cached_prefixes_still_gets_its_loras(
    make_job: MakeJob,
    rules: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*_: object) -> object:
        raise GuardError("this base does not keep the keys and values of every position")
        yield

    job = make_job(max_steps=1)
    monkeypatch.setattr("train.prefix.trainer.fit", refused)
    with pytest.raises(GuardError, match="not trained: toy alora seed 0"):
        run("toy", job.recipe, runs=job.runs, rules=rules)
    assert "does not keep the keys and values" in capsys.readouterr().out
    assert is_current(job.folder, job.inputs)


@pytest.mark.slow
def test_modules_that_the_base_has_not_are_refused_before_anything_is_trained(
    make_job: MakeJob, rules: Path
) -> None:
    job = make_job()
    lora = job.recipe.methods["lora"].model_copy(update={"lora": {"target_modules": ["q_prj"]}})
    recipe = job.recipe.model_copy(update={"methods": job.recipe.methods | {"lora": lora}})
    with pytest.raises(GuardError, match=r"methods\.lora\.lora.*q_prj"):
        run("toy", recipe, runs=job.runs, rules=rules)
    assert not job.folder.parent.exists()


@pytest.mark.slow
def test_an_adapter_that_another_command_trains_is_left_to_it(
    make_job: MakeJob, rules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job(max_steps=1)
    job.scratch.mkdir(parents=True)
    with (job.scratch / LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(GuardError, match="not trained: toy lora seed 0"):
            run("toy", job.recipe, methods=["lora"], seeds=[0, 1], runs=job.runs, rules=rules)
    assert "another command is training this" in capsys.readouterr().out
    assert [path.name for path in sorted(job.folder.parent.glob("lora*"))] == ["lora-seed1"]


@pytest.mark.slow
def test_processes_share_out_rules(make_job: MakeJob, rules: Path) -> None:
    job = make_job(max_steps=1)
    for name in ("other", "third"):
        (rules / f"{name}.yaml").write_text(
            yaml.safe_dump(RULE.model_dump(mode="json") | {"id": name})
        )
        for split in SPLITS:
            examples = [
                replace(one, rule=name) for one in read_examples(job.data / f"{split}.jsonl")
            ]
            write_examples(job.runs.data(name) / f"{split}.jsonl", examples)
    run("all", job.recipe, methods=["lora"], runs=job.runs, rules=rules, process=Process(1, 2))
    made = {path.parent.name for path in job.runs.root.glob("toy/*/lora")}
    assert made == {"third"}
    run("all", job.recipe, methods=["lora"], runs=job.runs, rules=rules, process=Process(0, 2))
    assert {path.parent.name for path in job.runs.root.glob("toy/*/lora")} == {
        "other",
        "third",
        "toy",
    }


@pytest.mark.slow
def test_force_with_a_bad_recipe_leaves_what_was_trained(make_job: MakeJob, rules: Path) -> None:
    job = make_job(max_steps=1)
    train(job, rules)
    with pytest.raises(GuardError, match="unknown key"):
        train(make_job(max_step=1), rules, force=True)
    assert is_current(job.folder, job.inputs)


@pytest.mark.slow
def test_the_rows_of_a_rule_are_read_once_for_all_its_adapters(
    make_job: MakeJob, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, read = make_job(max_steps=1), []
    monkeypatch.setattr("train.run.load", lambda *args: (read.append(args), load(*args))[1])
    run("toy", job.recipe, seeds=[0, 1], runs=job.runs, rules=rules)
    assert len(read) == 1


@pytest.mark.slow
def test_what_fails_in_one_of_several_processes_does_not_make_the_launcher_kill_the_others() -> (
    None
):
    command = [sys.executable, "-m", "train.run", "--rule", "no_such_rule"]
    for world, status in (("1", 2), ("2", 0)):
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"WORLD_SIZE": world},
            capture_output=True,
            text=True,
        )
        assert done.returncode == status
        assert "error: " in done.stderr and "no_such_rule" in done.stderr


@pytest.mark.slow
def test_a_process_knows_how_many_share_its_machine(
    make_job: MakeJob, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(
        "train.prefix.trainer.fit",
        lambda jobs, processes: (told.append(processes), [GuardError("stop")])[1],
    )
    job = make_job("alora")
    with pytest.raises(GuardError, match="not trained"):
        run(
            "toy",
            job.recipe,
            methods=["alora"],
            runs=job.runs,
            rules=rules,
            process=Process(0, 8, 4),
        )
    assert told == [4]


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
    make_job: MakeJob,
    capsys: pytest.CaptureFixture[str],
    file: str,
    content: bytes | None,
    why: str,
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


def test_weights_whose_card_was_edited_are_trained_again(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job()
    finish_at_once(job)
    content = json.loads((job.folder / CARD).read_text())
    (job.folder / CARD).write_text(json.dumps(content | {"threshold": 0.99}))
    outdated, failed = outdated_jobs([job], force=False)
    assert [of for of, _ in outdated] == [job] and failed == []
    assert "to be trained again: the card was edited" in capsys.readouterr().out


def test_a_card_with_other_keys_is_told_and_nothing_is_trained_for_it(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job()
    finish_at_once(job)
    (job.folder / CARD).write_bytes(b'{"rule": "toy"}')
    assert outdated_jobs([job], force=False) == ([], [job.name])
    out = capsys.readouterr().out
    assert "missing key" in out and "`make train` for this rule, with FORCE=1" in out


def test_a_job_that_another_command_has_done_meanwhile_is_not_done_again(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_weights_that_a_killed_run_had_written_whole_are_not_trained_again(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_job()
    finish_at_once(job)
    job.scratch.mkdir()
    job.folder.rename(job.scratch / "export")
    work, _ = outdated_jobs([job], force=False)
    assert [of for of, _ in work] == [job]
    assert claimed_jobs(work, force=False) == ([], [])
    assert capsys.readouterr().out == "toy lora seed 0: up to date\n"
    assert load_card(job.folder) and not job.scratch.exists()


def test_data_that_change_while_a_job_waits_make_its_weights_outdated(
    make_job: MakeJob, rules: Path
) -> None:
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
