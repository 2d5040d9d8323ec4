"""What a training step of an aLoRA takes on cached prefixes and by TRL on whole prompts, as a line
of JSON. Rows are random words, and no weights are kept. Knows nothing of reports.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from guard.arguments import count
from guard.conversation.example import SPLITS, Message
from guard.errors import exits_cleanly
from guard.layout import Runs
from guard.prompt.decoder import PromptBuilder
from guard.recipe import MethodSettings, load_recipe
from guard.rule import load_rule
from train.examples import Row, Rows
from train.job import Job

METHOD, BATCH, STEPS = "alora", 4, 6


def job_of(model: str, folder: Path) -> Job:
    """A recipe's aLoRA, to be trained for STEPS, with empty files of examples in `folder`."""
    recipe, rule = load_recipe(model), load_rule("medical_advice")
    stated = recipe.settings(METHOD)
    trainer = stated.trainer | {"max_steps": STEPS, "save_steps": 2 * STEPS}
    trainer |= {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1}
    settings = MethodSettings(lora=stated.lora, trainer=trainer)
    recipe = recipe.model_copy(update={"methods": {METHOD: settings}})
    job = Job(rule, recipe, METHOD, 0, PromptBuilder.of(recipe), Runs(folder))
    job.data.mkdir(parents=True)
    for split in SPLITS:
        (job.data / f"{split}.jsonl").touch()
    return job


def random_rows(job: Job, tokens: int) -> Rows:
    """One batch."""
    draw, words, rows = random.Random(0), job.rule.policy.split(), list[Row]()
    for number in range(BATCH):
        message = Message("user", " ".join(draw.choices(words, k=tokens)))
        prompt = job.builder.build([message], job.rule_text)
        rows.append(Row(str(number), "train", number % 2, prompt))
    return Rows(tuple(rows), (), ())


def trl_ends_s(job: Job, rows: Rows) -> list[float]:
    """When each step of TRL ended."""
    from transformers import TrainerCallback

    from train.adapter.trl import trl_trainer

    ends_s: list[float] = []
    callback: Any = TrainerCallback()
    callback.on_step_end = lambda *_, **__: ends_s.append(time.perf_counter())
    job.open_scratch()
    trainer = trl_trainer(job, rows)
    trainer.add_callback(callback)
    trainer.train()
    job.close_scratch()
    return ends_s


def cached_ends_s(job: Job, rows: Rows) -> list[float]:
    """When each step on cached prefixes ended."""
    from train.adapter.load import load_base
    from train.adapter.settings import trainer_config
    from train.prefix.cache import budget_of
    from train.prefix.fleet import Fleet
    from train.prefix.member import Member

    member, ends_s = Member(job, rows, trainer_config(job)), list[float]()
    base = load_base(job.recipe, member.config.device)
    fleet = Fleet(base, [member], budget_of(job, base.device))
    fleet.begin()
    while member.running:
        list(fleet.step())
        ends_s.append(time.perf_counter())
    return ends_s


def median_step_s(ends_s: list[float]) -> float:
    """Of the steps behind the first, which is always slow."""
    return statistics.median(end - start for start, end in itertools.pairwise(ends_s))


@exits_cleanly
def main() -> None:
    """Measure both sides, one after the other, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m train.step_times", description=__doc__)
    parser.add_argument("model", help="a recipe")
    parser.add_argument("tokens", type=count, help="of a prompt, about")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(arguments.model, Path(folder))
        rows = random_rows(job, arguments.tokens)
        trl_s = median_step_s(trl_ends_s(job, rows))
        cached_s = median_step_s(cached_ends_s(job, rows))
    lengths = {"prefix_tokens": rows.train[0].prompt.invocation_start, "rows_a_step": BATCH}
    steps_s = {"trl_step_s": trl_s, "cached_step_s": cached_s, "ratio": trl_s / cached_s}
    print(json.dumps(lengths | steps_s))


if __name__ == "__main__":
    main()
