"""One report of what a GPU does with the engine and with training: `make gpu-check`.

A cell is a function that measures one thing, in a process of its own, whose home (CENTURION_HOME)
has a base of random weights in a real one's shape. Figures are written after each cell; one that
failed is measured again by the next run, and the others go on. The last alone asks a hub.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from guard.errors import GuardError
from guard.files.atomic import atomic_write
from guard.files.yaml_file import validate
from guard.home import HOME, ROOT
from guard.layout import Runs, fingerprint, running_code
from guard.machine.device import installed_device
from guard.machine.provenance import gpus, hardware, versions
from guard.prompt.decoder import PromptBuilder
from guard.recipe import MODELS, Recipe, load_recipe
from serve.bench.calibrate import BurstMeter
from serve.bench.engines import scores_of
from serve.bench.harness import BenchCommand
from serve.bench.report import BenchReport, origin
from serve.bench.workload.adapters import copies, random_adapters
from serve.bench.workload.prompts import RULE_TEXT, conversation, random_rule_text
from serve.engine import CODE, GuardEngine, ScoreRequest

Figures = dict[str, Any]  # also `text`; `failure` or `skipped` say why there are none that count
BASE, BENCH, TRAIN = HOME / "base", Path(__file__).parent, ROOT / "train"
TOKENS, DRY_TOKENS = 1000, 120  # of a conversation in every mode and in training
SHORT, RULES, REPEATS = 100, 20, 5  # tokens of another one, its rules, and how often it is timed
# How far an engine may be from PEFT: so many times as far as PEFT is from itself in float32, and a
# little for the orders of sums.
ROUNDINGS, SLACK_NATS = 3, 0.02
LOGGED = 3000  # characters of an error, the last
LONG = {"text", "logits", "rows"}  # figures that have no place in a line
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}},
    "captured": {"enforce_eager": False},  # as far as vLLM's defaults go
}
# Where it is not Qwen3Config's own.
OF_4B: dict[str, Any] = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
OF_4B |= {"num_key_value_heads": 8}
NARROW: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
NARROW |= {"head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
NARROW |= {"vocab_size": 16_384}


@dataclass(frozen=True)
class CellInput:
    """What a cell knows: the recipe whose base is imitated, and the figures of the cells before."""

    model: str
    is_dry: bool
    tokens: int
    before: Mapping[str, Figures]


def doctor(known: CellInput) -> Figures:
    """What `make doctor` calls a problem; here nothing fails by it."""
    said = _stage("serve.doctor", "--model", known.model, statuses=(0, 1))
    problems = [line for line in said.splitlines() if line.startswith("PROBLEM")]
    return {"problems": len(problems), "text": "\n".join(problems)}


def weights(known: CellInput) -> Figures:
    """Make the base, and for each mode a recipe that names it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    like, shape = load_recipe(known.model), NARROW if known.is_dry else OF_4B
    config = Qwen3Config(**shape, max_position_embeddings=40_960, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(installed_device()):
        model = Qwen3ForCausalLM(config).to(getattr(torch, like.dtype))
    model.save_pretrained(BASE)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # the vocabulary holds its words
        shutil.copy(Path(load_recipe("tiny").base_path, name), BASE)
    changes = {"base": str(BASE), "revision": None, "answer_prefix": ""}
    MODELS.mkdir(parents=True, exist_ok=True)
    for mode, engine in MODES.items():
        recipe = like.model_copy(update={**changes, "name": mode, "engine": like.engine | engine})
        with atomic_write(MODELS / f"{mode}.yaml") as part:  # JSON is YAML
            part.write_text(recipe.model_dump_json(exclude_defaults=True), encoding="utf-8")
    return {"parameters": model.num_parameters(), "dtype": like.dtype}


def peft(known: CellInput) -> Figures:
    """What PEFT answers in the dtype of serving, and how far from it an engine may be."""
    recipe = load_recipe("eager")
    logits = _peft_logits(recipe, known.tokens, recipe.serving_dtype)
    rounding_nats = _furthest(logits, _peft_logits(recipe, known.tokens, "float32"))
    range_nats = max(logits) - min(logits)
    allowed_nats = ROUNDINGS * rounding_nats + SLACK_NATS
    return {"logits": logits, "range_nats": range_nats, "allowed_nats": allowed_nats}


def served(mode: str, known: CellInput) -> Figures:
    """An engine in this mode: a mixed batch held to PEFT's, and how long aLoRAs take."""
    if mode != "eager" and installed_device() == "cpu":
        return {"skipped": "it needs a GPU"}
    recipe, reference = load_recipe(mode), known.before["peft"]
    if not is_good(reference):
        return {"skipped": "there is nothing of PEFT's to hold it to"}
    methods = recipe.adapter_methods
    with random_adapters(recipe, methods, 1) as folders:
        _, adapters = copies({method: [folders[f"{method}-0"]] for method in methods}, RULES)
        begun = time.perf_counter()
        with GuardEngine(recipe, adapters, max_loras=len(adapters)) as engine:
            start_s = time.perf_counter() - begun
            scores = scores_of(engine.score(_mixed_batch(recipe, known.tokens)), where=mode)
            meter = BurstMeter(engine, recipe, "alora", most_rules=RULES)
            bursts = [meter.run([(known.tokens, RULES)]) for _ in range(REPEATS + 1)][1:]
    off_nats = _furthest([score.logit for score in scores], reference["logits"])
    wall_ms = statistics.median(burst.submit_ms + burst.steps_ms for burst in bursts)
    figures: Figures = {"start_s": start_s, "off_peft_nats": off_nats, "wall_ms": wall_ms}
    if off_nats > reference["allowed_nats"]:
        figures["failure"] = "it does not answer as PEFT does"
    return figures


def latency(known: CellInput) -> Figures:
    """The grid of `make serve`, in the fastest mode that answers as PEFT does."""
    good = [mode for mode in MODES if is_good(known.before[mode])]
    if not good:
        return {"skipped": "no engine answers as PEFT does"}
    fastest = min(good, key=lambda mode: float(known.before[mode]["wall_ms"]))
    options, name = ["--repeats", "2"], "latency.json"
    if known.is_dry:
        options, name = ["--quick", "--repeats", "1"], "latency_quick.json"
    said = _stage("serve.bench", "latency", "--model", fastest, *options)
    report = json.loads((Runs().root / name).read_text(encoding="utf-8"))
    return {"mode": fastest, "text": said, "rows": report["rows"]}


def training(known: CellInput) -> Figures:
    """A training step on cached prefixes, and TRL's."""
    said = _stage("train.step_times", "eager", str(known.tokens))
    figures: Figures = json.loads(said.splitlines()[-1])
    return figures


def real_weights(known: CellInput) -> Figures:
    """The real base, of a hub, trained on one rule, to the quality table."""
    if installed_device() == "cpu":
        return {"skipped": "it needs a GPU"}
    try:
        _ = load_recipe(known.model).base_revision
    except GuardError as error:
        return {"skipped": error.problem}
    rule = ("--rule", "medical_advice")
    _stage("data.build", *rule)
    for stage in ("train.run", "eval.run"):
        _stage(stage, *rule, "--model", known.model, "--method", "alora")
    return {"text": Runs().report.with_suffix(".md").read_text(encoding="utf-8")}


# Name -> what measures it, and the seconds after which it is given up.
CELLS: dict[str, tuple[Callable[[CellInput], Figures], int]] = {
    "doctor": (doctor, 120),
    "weights": (weights, 180),
    "peft": (peft, 180),
    **{mode: (functools.partial(served, mode), 240) for mode in MODES},
    "latency": (latency, 400),
    "training": (training, 240),
    "real_weights": (real_weights, 4 * 3600),
}


class GpuReport(BenchReport):
    """The figures of cells. `inputs`: a fingerprint of all that they depend on."""

    inputs: str
    cells: dict[str, Figures]

    @property
    def markdown(self) -> str:
        """A line for each cell, then what has several lines: to be posted as it is."""
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines, texts = [f"# GPU check: {self.source}", packages], list[str]()
        for cell, figures in self.cells.items():
            shown = [f"{name} {figures[name]}" for name in figures if name not in LONG]
            lines.append(f"- **{cell}**: {', '.join(shown)}")
            if figures.get("text"):
                texts.append(f"## {cell}\n\n```\n{figures['text'].rstrip()}\n```")
        return "\n\n".join([*lines, *texts]).replace(f"{Path.home()}/", "~/") + "\n"


class GpuCheck(BenchCommand):
    """Measures the cells that have no good figures yet."""

    name = "gpu_check"
    summary = "make gpu-check: what a GPU does, in one report to be posted"
    duration = "12 min on an H100"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--dry", action="store_true", help="tiny shapes, on a CPU")
        parser.add_argument("--force", action="store_true", help="also what is measured already")

    def main(self) -> None:
        """Measure, and write the report after each cell. Raises GuardError for what is missing, and
        in the end if a cell has failed.
        """
        if not self.options.dry and (installed_device() == "cpu" or not gpus()):
            got = f"packages for {installed_device()}; {hardware()}"
            remedy = "`make setup DEVICE=cuda` where nvidia-smi lists one; DRY=1 tries it on a CPU"
            raise GuardError("this measures a GPU, by CUDA's packages", got=got, remedy=remedy)
        home, path = self.runs.root.absolute() / "gpu_check", self.runs.root / "gpu_check.json"
        code = running_code((*CODE, *sorted(BENCH.rglob("*.py")), *sorted(TRAIN.rglob("*.py"))))
        inputs = fingerprint(code, hardware(), versions(), self.options.dry, self.recipe.name)
        cells = self._good_cells(path, inputs)
        if not cells:
            shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True, exist_ok=True)
        os.environ["CENTURION_HOME"] = str(home)  # of the processes that measure
        for cell, (measure, limit_s) in CELLS.items():
            if cell not in cells:
                print(f"{cell}: at most {limit_s:,} s", flush=True)
                tokens = DRY_TOKENS if self.options.dry else TOKENS
                known = CellInput(self.recipe.name, self.options.dry, tokens, cells)
                cells[cell] = measured_apart(measure, known, limit_s)
            report = GpuReport(**origin(self.recipe), inputs=inputs, cells=cells)
            report.save(path)
            path.with_suffix(".md").write_text(report.markdown, encoding="utf-8")
        print(report.markdown, f"written: {path} and .md", sep="\n")
        if failed := [cell for cell in CELLS if "failure" in cells[cell]]:
            remedy = "The report says why; the same command measures them again"
            raise GuardError(f"these cells failed: {', '.join(failed)}", remedy=remedy)

    def _good_cells(self, path: Path, inputs: str) -> dict[str, Figures]:
        """What an earlier run has measured of the same inputs."""
        with suppress(OSError, ValueError, GuardError):  # there is no report of this version
            report = validate(json.loads(path.read_text("utf-8")), GpuReport, where=path)
            is_kept = path.with_suffix("").is_dir() and not self.options.force
            if is_kept and report.inputs == inputs:
                return {cell: kept for cell, kept in report.cells.items() if is_good(kept)}
        return {}


def measured_apart(
    measure: Callable[[CellInput], Figures], known: CellInput, limit_s: float
) -> Figures:
    """Measure in a process of its own, which ends with all it started; its error is a figure."""
    begun, spawned = time.perf_counter(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as process:
        pid = process.submit(os.getpid).result()
        try:
            figures = process.submit(measure, known).result(limit_s)
        except Exception as error:  # whatever libraries raise, and a process that dies
            figures = {"failure": type(error).__name__, "text": f"{error.__cause__} {error}"}
        finally:
            with suppress(psutil.NoSuchProcess):
                worker = psutil.Process(pid)
                for ended in (*worker.children(recursive=True), worker):
                    ended.kill()
    figures["seconds"] = time.perf_counter() - begun
    for name, value in figures.items():
        if isinstance(value, float):
            figures[name] = float(f"{value:.4g}")
    return figures


def is_good(figures: Figures) -> bool:
    return not figures.keys() & {"failure", "skipped"}


def _mixed_batch(recipe: Recipe, tokens: int) -> list[ScoreRequest]:
    """On each of two conversations the base and an adapter of each method."""
    prompts, batch = PromptBuilder.of(recipe), list[ScoreRequest]()
    for length in (SHORT, tokens):
        messages = conversation(prompts, length, seed=length)
        batch.append(ScoreRequest(messages, RULE_TEXT, None))
        for method in recipe.adapter_methods:
            batch.append(ScoreRequest(messages, random_rule_text(recipe), f"{method}-0"))
    return batch


def _peft_logits(recipe: Recipe, tokens: int, dtype: str) -> list[float]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    prompts, logits = PromptBuilder.of(recipe), list[float]()
    base: Any = AutoModelForCausalLM.from_pretrained(str(BASE), dtype=getattr(torch, dtype))
    base = base.to(installed_device()).eval()
    with random_adapters(recipe, recipe.adapter_methods, 1) as folders, torch.no_grad():
        for messages, rule_text, name, *_ in _mixed_batch(recipe, tokens):
            model = base
            if name is not None:
                model = PeftModel.from_pretrained(base, str(folders[name])).to(base.dtype).eval()
            ids = [prompts.build(messages, rule_text).token_ids]
            inputs = torch.tensor(ids, device=base.device)
            answer = model(input_ids=inputs, logits_to_keep=1).logits[0, -1].float()
            logits.append(float(answer[prompts.yes_id] - answer[prompts.no_id]))
            if name is not None:
                base = model.unload()
    return logits


def _furthest(logits: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(logit - exact) for logit, exact in zip(logits, reference, strict=True))


def _stage(module: str, *arguments: str, statuses: Sequence[int] = (0,)) -> str:
    """What another stage prints. Raises GuardError if it ends with another status."""
    command, log = [sys.executable, "-m", module, *arguments], HOME / f"{module}.log"
    with log.open("w", encoding="utf-8") as errors:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    if done.returncode not in statuses:
        said = log.read_text(encoding="utf-8", errors="replace")
        raise GuardError(f"python -m {module} failed: {said[-LOGGED:]}")
    return done.stdout
