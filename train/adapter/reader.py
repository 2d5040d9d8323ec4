"""The reader that an aLoRA of its base may start as, and what it answers on a rule's day zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel
from safetensors import numpy
from safetensors.torch import load_file
from torch import Tensor

from guard.errors import GuardError
from guard.method import HEAD, PEFT_WEIGHTS
from guard.prompt.decoder import Prompt
from guard.recipe import Recipe
from guard.weights.card import Card, load_card
from guard.weights.head import Head
from train.adapter.trained import TrainedAdapter, prompts_about
from train.base import load_served_base
from train.examples import Row
from train.job import Job

# What an adapter has in common with the reader that it starts as.
SHAPE = ("r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern")
# The last reader on its base, by its version; and what it answered, which a study asks again.
_loaded: dict[tuple[str, str], tuple[PeftModel, dict[Prompt, float]]] = {}


class Reader(NamedTuple):
    """The reader's card, the factors of its adapter by PEFT's names, and its head."""

    card: Card
    factors: Mapping[str, Tensor]
    head: Head


def load_reader(recipe: Recipe) -> Reader:
    """Raises GuardError where a file is missing or is not the card's, or the head has words."""
    folder = recipe.reader_folder
    assert folder is not None
    card, head = load_card(folder), None
    if HEAD in card.files:
        head = Head.of_tensors(numpy.load_file(folder / HEAD), folder / HEAD, "Restore the file")
    if head is None or head.words:
        problem = "a reader is an aLoRA with a head without words"
        raise GuardError(problem, where=folder, remedy="Name another folder as the `reader`")
    return Reader(card, load_file(folder / PEFT_WEIGHTS), head)


def check_reader(job: Job, adapter: LoraConfig) -> None:
    """Raise GuardError where the reader is damaged or of another base or prompt, or `adapter`, with
    its modules by name, cannot start as it.
    """
    card = load_reader(job.recipe).card
    config = LoraConfig.from_pretrained(str(job.recipe.reader_folder))
    pairs: dict[str, tuple[object, object]] = {
        "base": (job.base_revision, card.base_revision),
        "prompt": (job.builder.hash, card.prompt_hash),
    }
    for name in SHAPE if job.settings.start else ():
        pairs[name] = getattr(adapter, name), getattr(config, name)
    for name, (own, readers) in pairs.items():
        if own != readers:
            got, remedy = (
                f"{own}, the reader {readers}",
                "State the reader's, or leave out `reader`",
            )
            problem = f"the reader has another {name}"
            raise GuardError(problem, where=job.where("lora"), got=got, remedy=remedy)


def day_zero_logits(job: Job, rows: Sequence[Row]) -> list[float]:
    """What the reader answers on the rows' conversations in nats, through plain PEFT, whatever the
    rows' prompts say of the rule.
    """
    reader = load_reader(job.recipe)
    key = job.recipe.name, reader.card.version
    if key not in _loaded:
        _loaded.clear()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        base = load_served_base(job.recipe, device)
        _loaded[key] = PeftModel.from_pretrained(base, str(job.recipe.reader_folder)), {}
    model, known = _loaded[key]
    if not job.of_study:
        known.clear()
    asked = prompts_about(job, job.rule.text("reader"), rows)
    unread = [prompt for prompt in dict.fromkeys(asked) if prompt not in known]
    answers = TrainedAdapter(model, job, head=reader.head).logits(unread)
    known |= zip(unread, answers, strict=True)
    return [known[prompt] for prompt in asked]
