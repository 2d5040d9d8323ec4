"""The whole stage: learn, calibrate, export, skip, refuse, resume; and the points of a study."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import yaml
from peft import PeftModel
from pytest import CaptureFixture, MonkeyPatch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from guard.calibrate import calibrate
from guard.conversation.example import SPLITS
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import fingerprint, is_current
from guard.method import METHODS, PEFT_CONFIG, PEFT_WEIGHTS, WORDS
from guard.prompt.builders import prompt_builder
from guard.rule import MANIFEST_KEY, text_hash
from guard.study import Study, StudyPoint, point_runs
from guard.weights.card import CARD, load_card
from guard.weights.predictions import read_predictions
from tests.train.conftest import (
    ADAPTERS,
    RULE,
    MakeJob,
    RankedWeights,
    calls_of,
    data,
    encoder_recipe,
    finish_at_once,
    job_in,
    write_toy_data,
)
from train import run as train_run
from train.adapter.trained import TrainedAdapter
from train.job import LOCK, Job
from train.methods import TRAINERS, TrainingWork
from train.run import claimed_jobs, finish, outdated_jobs, run, see_one_gpu
from train.run import train as train_work
from train.study import train_study

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


def write_rule(folder: Path) -> Path:
    (folder / "toy.yaml").write_text(yaml.safe_dump(RULE.model_dump(mode="json")))
    return folder


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    return write_rule(tmp_path)


def train(job: Job, rules: Path, **options: Any) -> None:
    run("toy", job.recipe, methods=[job.method], runs=job.runs, rules=rules, **options)


def command(job: Job, rules: Path) -> list[str]:
    """Trains the job in a process of its own."""
    models = rules / "models"
    models.mkdir()
    (models / "toy.yaml").write_text(yaml.safe_dump(job.recipe.model_dump(mode="json")))
    return [sys.executable, "-c", TRAIN, str(rules), str(job.runs.root), job.method]


@pytest.fixture(scope="module", params=ADAPTERS)
def learned(
    request: pytest.FixtureRequest, toy_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Job:
    """A job that one command has trained, in steps of 16 an epoch, with a checkpoint every 5."""
    folder = tmp_path_factory.mktemp("learned")
    job = job_in(folder / "runs", toy_base, request.param, n_train=128, learning_rate=3e-3)
    train(job, write_rule(folder))
    return job


@pytest.mark.slow
def test_one_command_learns_a_rule_that_one_word_decides(learned: Job) -> None:
    names = {PEFT_CONFIG, PEFT_WEIGHTS, CARD, "predictions.jsonl", "stage.json"}
    assert {path.name for path in learned.folder.iterdir()} == names
    assert is_current(learned.folder, learned.inputs) and not learned.scratch.exists()
    card = load_card(learned.folder)
    assert (card.rule, card.rule_hash, card.seed) == ("toy", text_hash(RULE.text()), 0)
    assert (card.method, card.prompt_hash) == (learned.method, learned.builder.hash)
    assert card.base_revision == learned.recipe.base_revision
    assert {"torch", "transformers", "peft", "trl"} <= set(card.versions)
    assert card.metrics["validation"]["accuracy_ci95"][0] > 0.7
    right = 0
    for row, logit in read_predictions(learned.folder, "test", "").items():
        label = int(row.removeprefix("test-")) % 2
        right += card.calibration.verdict("toy", logit).violates == bool(label)
    assert right >= 26


@pytest.mark.slow
def test_plain_peft_gives_the_logits_written(learned: Job, toy_base: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(toy_base)
    model = PeftModel.from_pretrained(base, learned.folder).eval()
    lines = (learned.folder / "predictions.jsonl").read_text().splitlines()
    rows, builder = data(learned), learned.builder
    for row, line in list(zip((*rows.validation, *rows.test), lines, strict=True))[::7]:
        with torch.inference_mode():
            last = model(input_ids=torch.tensor([row.prompt.token_ids])).logits[0, -1]
        log_p = last.log_softmax(0)
        expected = float(log_p[builder.yes_id] - log_p[builder.no_id])
        written = json.loads(line)
        assert (written["id"], written["split"]) == (row.id, row.split)
        assert written["logit"] == pytest.approx(expected, abs=1e-4)


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
    metrics = finish(job, rows, trained)["validation"]
    assert (metrics["n"], metrics["accuracy"], metrics["auroc"]) == (32, 1.0, 1.0)
    calibration = calibrate(validation, [row.label for row in rows.validation])
    card = load_card(job.folder)
    assert card.coverage is not None
    assert (card.coverage.sure_logit, card.coverage.sure_logit_long) == (3.0, 3.0)
    assert card.calibration == replace(calibration, coverage=card.coverage)
    assert card.metrics["validation"] == metrics
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


def test_what_cannot_be_finished_keeps_no_neighbour(
    make_job: MakeJob, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """Of jobs that are trained together; nor does a job that its trainer gives up on, the fifth."""
    no_disk = SafetensorError("I/O error: No space left on device")
    faults: dict[int, tuple[str, Callable[..., Any]]] = {
        1: ("logits", lambda _: torch.empty(2**60)),
        2: ("logits", raising(torch.OutOfMemoryError("CUDA out of memory"))),
        3: ("save", lambda _: Path("/dev/full").write_bytes(b"weights")),
        4: ("save", raising(no_disk)),
    }

    def fit(work: TrainingWork) -> Iterator[RankedWeights | GuardError]:
        for job, rows in work:
            trained = RankedWeights(rows)
            if job.seed in faults:
                setattr(trained, *faults[job.seed])
            yield GuardError("it diverged") if job.seed == 5 else trained

    together = replace(TRAINERS["decoder"]["alora"], fit=fit)
    monkeypatch.setitem(TRAINERS["decoder"], "alora", together)
    jobs = [make_job("alora", seed=seed) for seed in range(7)]
    failed = train_work([(job, data(job)) for job in jobs])
    assert failed == [f"toy alora seed {seed}" for seed in range(1, 6)]
    printed = capsys.readouterr().out
    told_of = {1: NO_MEMORY, 2: NO_MEMORY, 3: NO_DISK, 4: NO_DISK, 5: "it diverged"}
    for seed, told in told_of.items():
        assert re.search(f"^toy alora seed {seed}: .*{told}", printed, re.MULTILINE)
    done = [is_current(job.folder, job.inputs) for job in jobs]
    assert done == [True, *[False] * 5, True]


def test_finished_weights_are_made_again_only_if_inputs_changed_or_by_force(
    make_job: MakeJob, rules: Path, at_once: list[str], monkeypatch: MonkeyPatch, capfd: Any
) -> None:
    """A busy machine is told before training alone; a process with nothing to do loads no torch."""
    told: list[str] = []
    monkeypatch.setattr("train.run.warn_if_busy", told.append)
    job = make_job()
    train(job, rules)
    assert at_once == [job.name] and told == ["training may take several times as long"]
    assert "validation accuracy" in capfd.readouterr().out
    train(job, rules)
    subprocess.run(command(job, rules), cwd=ROOT, check=True)
    assert capfd.readouterr().out == 2 * "toy lora seed 0: up to date\n" + "False\n"
    assert len(at_once) == len(told) == 1
    train(job, rules, force=True)
    train(make_job(max_steps=2), rules)
    assert at_once == [job.name] * 3 and len(told) == 3
    with pytest.raises(GuardError, match="unknown key"):
        train(make_job(max_step=1), rules, force=True)
    changed = make_job(max_steps=2)
    assert is_current(changed.folder, changed.inputs)


@pytest.mark.usefixtures("at_once")
def test_bad_data_of_one_rule_is_told_before_any_training_and_leaves_the_others(
    make_job: MakeJob, rules: Path, capsys: CaptureFixture[str]
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
    broken, of_other_rule, untold, training = capsys.readouterr().out.splitlines()[:4]
    assert broken.startswith("broken: ") and "broken.yaml" in broken
    assert 'the rows of relabelled were made for turns: "last"' in of_other_rule
    assert untold.startswith("untold: ") and "make data" in untold
    assert training == "toy lora seed 0: training" and is_current(job.folder, job.inputs)


@pytest.mark.parametrize("method", ADAPTERS)
@pytest.mark.usefixtures("at_once")
def test_weights_that_fail_in_training_are_named_at_the_end_and_keep_no_others(
    make_job: MakeJob, rules: Path, monkeypatch: MonkeyPatch, method: str, capsys: Any
) -> None:
    """Those of seed 1: what was trained before them and what is trained apart from them stays."""
    trainer = TRAINERS["decoder"][method]

    def fit(work: TrainingWork) -> Iterator[Any]:
        yield from trainer.fit([(job, rows) for job, rows in work if job.seed == 0])
        if work[-1][0].seed == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(TRAINERS["decoder"], method, replace(trainer, fit=fit))
    job = make_job()
    with pytest.raises(GuardError, match=f"not trained: toy {method} seed 1"):
        run("toy", job.recipe, seeds=[0, 1], runs=job.runs, rules=rules)
    printed = capsys.readouterr().out
    assert re.search(f"^toy {method} seed 1: .*{NO_MEMORY}", printed, re.MULTILINE)
    made = {path.name for path in job.folder.parent.iterdir() if not path.name.startswith(".")}
    assert made == {"lora", "alora", "lora-seed1", "alora-seed1"} - {f"{method}-seed1"}


@pytest.mark.usefixtures("at_once")
def test_an_error_of_our_own_is_raised(make_job: MakeJob, monkeypatch: MonkeyPatch) -> None:
    job = make_job()
    monkeypatch.setattr(RankedWeights, "save", raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        train_work([(job, data(job))])


def test_an_adapter_that_another_command_trains_is_left_to_it(
    make_job: MakeJob, rules: Path, at_once: list[str], monkeypatch: MonkeyPatch, capsys: Any
) -> None:
    """And the rows of a rule are read once for all its adapters."""
    job = make_job()
    read = calls_of(monkeypatch, train_run, "load")
    job.scratch.mkdir(parents=True)
    with (job.scratch / LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(GuardError, match="not trained: toy lora seed 0"):
            run("toy", job.recipe, seeds=[0, 1], runs=job.runs, rules=rules)
    assert "another command is training this" in capsys.readouterr().out
    assert [path.name for path in sorted(job.folder.parent.glob("lora*"))] == ["lora-seed1"]
    assert len(read) == 1 and len(at_once) == 3


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        (PEFT_WEIGHTS, lambda weights: weights[:4], "the weights are not those of the card"),
        (PEFT_WEIGHTS, None, f"no {PEFT_WEIGHTS}"),
        (WORDS, None, "the weights are not those of the card"),
        (CARD, None, f"{CARD} cannot be read"),
        (CARD, lambda card: card[:1], f"{CARD} cannot be read"),
        (CARD, lambda card: card.replace(b'"seed": 0', b'"seed": 1'), "the card was edited"),
        (PEFT_CONFIG, lambda _: b'{"lora_alpha": 1}', "adapter_config.json is another file"),
        (PEFT_CONFIG, None, f"no {PEFT_CONFIG}"),
    ],
)
def test_weights_that_are_missing_torn_or_edited_are_trained_again(
    make_job: MakeJob, capsys: CaptureFixture[str], file: str, change: Any, why: str
) -> None:
    job = make_job()
    finish_at_once(job)
    assert outdated_jobs([job], force=False) == ([], [])
    content = (job.folder / file).read_bytes()
    (job.folder / file).unlink()
    if change:
        (job.folder / file).write_bytes(change(content))
    capsys.readouterr()
    outdated, failed = outdated_jobs([job], force=False)
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith(f"{job.name}: to be trained again: ") and why in told
    claimed, taken = claimed_jobs(outdated, force=False)
    assert [of for of, _ in claimed] == [job] and failed == taken == []
    finish_at_once(job)
    assert outdated_jobs([job], force=False) == ([], [])


def test_a_card_with_other_keys_is_told(make_job: MakeJob, capsys: CaptureFixture[str]) -> None:
    job = make_job()
    finish_at_once(job)
    (job.folder / CARD).write_bytes(b'{"rule": "toy"}')
    assert outdated_jobs([job], force=False) == ([], [job.name])
    out = capsys.readouterr().out
    assert "missing key" in out and "`make train` for this rule, with FORCE=1" in out


def test_a_job_done_meanwhile_stays_done(make_job: MakeJob, capsys: CaptureFixture[str]) -> None:
    """By another command, or by a run that was killed when it had written the folder whole."""
    job, other = make_job(), make_job("alora")
    work, _ = outdated_jobs([job, other], force=False)
    finish_at_once(job)
    job.scratch.mkdir()
    job.folder.rename(job.scratch / "export")
    assert [of for of, _ in outdated_jobs([job], force=False)[0]] == [job]
    for _ in range(2):
        assert claimed_jobs(work[:1], force=False) == ([], [])
        assert capsys.readouterr().out == "toy lora seed 0: up to date\n"
        assert load_card(job.folder) and not job.scratch.exists()
    job.claim()  # nothing holds it
    job.close_scratch()
    assert claimed_jobs(work, force=False) == ([work[1]], [])
    other.close_scratch()
    claimed, _ = claimed_jobs(work, force=True)
    assert claimed == work and not is_current(job.folder, job.inputs)
    for claimed_job in (job, other):
        claimed_job.close_scratch()


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
    """By one process: those of a launcher would all train the same."""
    monkeypatch.setattr("train.run.gpus", lambda: ["H200"] * gpus)
    environment = {"HOME": "/"} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    see_one_gpu(environment)
    assert environment.get("CUDA_VISIBLE_DEVICES") == seen
    see_one_gpu({"WORLD_SIZE": "1"})
    with pytest.raises(GuardError, match=r"got WORLD_SIZE=2.*one command a GPU"):
        see_one_gpu({"WORLD_SIZE": "2", "RANK": "1"})


POINTS = tuple(StudyPoint(rows=rows, seed=seed) for rows, seed in ((16, 0), (32, 1)))
OF_USER = RULE.model_copy(update={"judged": "user"})


@pytest.fixture
def of_study(tmp_path: Path) -> Path:
    # Too few rows to choose by that rate.
    rule = OF_USER.model_dump(mode="json") | {"max_fpr": 0.001}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(rule))
    return tmp_path


def write_study(folder: Path) -> None:
    study = Study(rule="toy", data="rows.csv", points=POINTS)
    study.save(folder)
    for point in POINTS:
        write_toy_data(point_runs(folder, point).data("toy"), n_train=point.rows, n_other=8)


@pytest.mark.slow
def test_each_point_is_trained_on_its_own_rows_with_its_own_seed_and_only_once(
    make_job: MakeJob,
    toy_encoder: Path,
    of_study: Path,
    tmp_path: Path,
    capsys: CaptureFixture[str],
    monkeypatch: MonkeyPatch,
) -> None:
    """Those of an encoder read its prompts."""
    encoder = encoder_recipe(toy_encoder, max_steps=1).model_copy(update={"name": "encoder"})
    recipes, folder = [make_job(max_steps=2).recipe, encoder], tmp_path / "study"
    write_study(folder)
    asked = calls_of(monkeypatch, TrainedAdapter, "logits")
    train_study(folder, recipes, rules=of_study)
    # An aLoRA's are known from its training, and coverage asks for none.
    assert [adapter.job.method for adapter, prompts in asked if prompts] == ["lora"] * len(POINTS)
    up_to_date: list[str] = []
    for recipe in recipes:
        prompt_hash = prompt_builder(recipe).hash
        for point in POINTS:
            runs = point_runs(folder, point)
            data_hash = fingerprint(*(runs.data("toy") / f"{split}.jsonl" for split in SPLITS))
            for method in recipe.methods:
                seed = point.seed * METHODS[method].is_seeded
                trained = runs.adapter(recipe.name, "toy", method, seed)
                card = load_card(trained)
                assert (card.data_hash, card.seed, card.max_fpr) == (data_hash, seed, None)
                assert (card.prompt_hash, card.reads) == (prompt_hash, recipe.reads(OF_USER))
                assert card.coverage is None
                assert len(read_predictions(trained, "test", "")) == 8
                up_to_date.append(f"toy {method} seed {seed}, {point.rows} rows: up to date")
    capsys.readouterr()
    train_study(folder, recipes, rules=of_study)
    assert capsys.readouterr().out.splitlines() == up_to_date


@pytest.mark.slow
def test_a_point_of_bad_rows_leaves_the_others(
    make_job: MakeJob, of_study: Path, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    job, folder = make_job(max_steps=1), tmp_path / "study"
    write_study(folder)
    (point_runs(folder, POINTS[0]).data("toy") / "test.jsonl").unlink()
    with pytest.raises(GuardError, match="not trained: rows-16-seed-0 on toy"):
        train_study(folder, [job.recipe.only("lora")], rules=of_study)
    assert "rows-16-seed-0 on toy: " in capsys.readouterr().out
    done = replace(job, runs=point_runs(folder, POINTS[1]), seed=POINTS[1].seed)
    assert is_current(done.folder, done.inputs)


def test_a_bad_recipe_is_refused_first(make_job: MakeJob, of_study: Path, tmp_path: Path) -> None:
    bad, folder = make_job(num_epochs=1), tmp_path / "study"
    write_study(folder)
    good = make_job(max_steps=1).recipe.model_copy(update={"name": "good"})
    with pytest.raises(GuardError, match="unknown key 'num_epochs'"):
        train_study(folder, [good, bad.recipe], rules=of_study)
    assert not point_runs(folder, POINTS[0]).adapter("good", "toy", "lora", 0).exists()
    with pytest.raises(GuardError, match="no such study"):
        train_study(tmp_path / "nowhere", [good], rules=of_study)
