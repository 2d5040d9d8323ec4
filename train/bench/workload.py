"""What the training benchmarks train: jobs and rows that no data set is needed for. Knows nothing
of clocks or reports.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from guard.conversation.example import SPLITS, Message
from guard.layout import Runs, fingerprint
from guard.prompt.decoder import Prompt, PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.rule import Rule
from train.examples import Row
from train.job import Job

Base = Literal["tiny", "25M", "narrow-4B"]
SUFFIX = 24  # tokens
MEDIAN = 300  # tokens of a conversation of the pool
SHORTEST = 40
LONGEST = 2000
RULE = Rule(
    id="bench",
    title="Bench.",
    policy="A benchmark.",
    judged="conversation",
    violates=("a",),
    allows=("b",),
)
NEVER = 10**6  # steps
RANDOM_25M: dict[str, Any] = {  # Qwen3's, 25 M parameters
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
RANDOM_BASES: dict[Base, dict[str, Any]] = {
    "25M": RANDOM_25M,
    "narrow-4B": {  # the layers and heads of Qwen3-4B, whose operators it has, in tiny widths
        **RANDOM_25M,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 4,
    },
}
TOKENIZER = ("tokenizer_config.json", "tokenizer.json")
LIKE_4B = ("dtype", "trainer", "methods", "engine")  # what its recipe states


def random_rows(builder: PromptBuilder, lengths: Sequence[int]) -> tuple[Row, ...]:
    """A row for each prefix length in tokens, of random words within the scaffold; every other one
    violates.
    """
    rng = random.Random(0)
    head = builder.prefix_ids(())
    rule_turn = builder.suffix_ids(RULE.title)
    scaffold = {*builder.prefix_ids([Message("user", "")]), *rule_turn}
    words = [token for token in range(1000, 10_000) if token not in scaffold]
    header = len(builder.invocation(RULE.title))
    rows = []
    for number, length in enumerate(lengths):
        prefix = [*head, *rng.choices(words, k=length - len(head))]
        rule_words = rng.choices(words, k=SUFFIX - len(rule_turn))
        suffix = [*rule_turn[:header], *rule_words, *rule_turn[header:]]
        prompt = Prompt((*prefix, *suffix), length)
        rows.append(Row(str(number), "train", number % 2, prompt))
    return tuple(rows)


def pool(builder: PromptBuilder, count: int) -> tuple[Row, ...]:
    """Rows as long as conversations are: log-normal about MEDIAN, SHORTEST to LONGEST tokens."""
    rng = random.Random(1)
    lengths = [MEDIAN * rng.lognormvariate(0, 0.6) for _ in range(count)]
    return random_rows(builder, [round(min(LONGEST, max(SHORTEST, length))) for length in lengths])


def job_of(base: Base, folder: Path, **trainer: Any) -> Job:
    """An aLoRA as its recipe trains it, on `base`, with these trainer settings.

    The recipe is that of Qwen3-4B for `narrow-4B`, else the tiny one.
    """
    recipe = _recipe(base)
    method = recipe.sharing_method  # the one that can be trained in both ways
    settings = recipe.settings(method)
    changed = settings.trainer | {"save_steps": NEVER} | trainer
    # As many steps as are asked for, however few rows they are.
    settings = settings.model_copy(update={"trainer": changed, "min_steps": None})
    recipe = recipe.model_copy(update={"methods": {**recipe.methods, method: settings}})
    builder = PromptBuilder.of(recipe)
    return in_folder(Job(RULE, recipe, method, 0, builder, Runs(folder)), folder)


def in_folder(job: Job, folder: Path) -> Job:
    """The job with its outputs there, and empty files of examples: its rows are given, not read."""
    job = replace(job, runs=Runs(folder))
    job.data.mkdir(parents=True)
    for split in SPLITS:
        (job.data / f"{split}.jsonl").touch()
    return job


def _recipe(base: Base) -> Recipe:
    """The tiny recipe with a rule's turn, or the same on random weights, made once."""
    recipe = load_recipe("tiny").model_copy(update={"rule_turn": "title"})
    if base == "tiny":
        return recipe
    tiny, shape = Path(recipe.base_path), RANDOM_BASES[base]
    made_from = fingerprint(shape, *[tiny / name for name in TOKENIZER])
    folder = Path(tempfile.gettempdir()) / f"train-bench-{base}-{made_from[:12]}"
    if not (folder / TOKENIZER[-1]).is_file():
        _make_base(folder, tiny, shape)
    if base == "narrow-4B":
        like = load_recipe("qwen3-4b")
        recipe = recipe.model_copy(update={name: getattr(like, name) for name in LIKE_4B})
    return recipe.model_copy(update={"base": str(folder)})


def _make_base(folder: Path, tiny: Path, shape: dict[str, Any]) -> None:
    """Random weights with the tiny base's tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(tiny / name, folder / name)
