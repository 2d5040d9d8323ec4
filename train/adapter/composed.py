"""A rule whose adapter is a sum of other rules' adapters. Nothing is trained, but a head on its
states where the recipe says so. Knows nothing of how its parents were trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from peft import PeftModel
from safetensors import numpy
from transformers import PreTrainedModel

from guard.errors import GuardError
from guard.method import HEAD, METHODS
from guard.verdict import Calibration
from guard.weights.head import Head
from guard.weights.low_rank import peft_config, write_sum
from train.adapter.trained import TrainedAdapter, prompts_about
from train.base import load_served_base
from train.calibration.validation import calibrated_loss
from train.examples import Rows
from train.head.fit import fitted
from train.job import Job

SHARES = (1.0, 0.8, 0.5, 0.3)  # of each parent's update; all of several is often too much


@dataclass(frozen=True)
class ComposedAdapter(TrainedAdapter):
    """The parents' adapters as one; and by rule what each parent answers on the test rows, logits
    in nats, and how that becomes a verdict.
    """

    of_parents: Mapping[str, tuple[Sequence[float], Calibration]] = field(default_factory=dict)


def check(job: Job) -> None:
    """Raise GuardError where the parents' adapters cannot be one that is served."""
    rank, where = 0, f"rule {job.rule.id}: compose"
    for folder, card in job.parents.items():
        if job.recipe.is_encoder or card.composed_of or card.untrained:
            problem = "only trained adapters of a decoder are composed"
            got = f"{card.rule} by {card.by}" + ", itself composed" * bool(card.composed_of)
            remedy = "Name rules that are trained, of a composed one its parents"
            raise GuardError(problem, where=where, got=got, remedy=remedy)
        config = peft_config(folder)
        invocation = None
        if METHODS[job.method].shares_conversation:
            invocation = list(job.builder.invocation(job.rule_text))
        pairs: dict[str, tuple[object, object]] = {
            "base": (card.base_revision, job.base_revision),
            "prompt": (card.prompt_hash, job.builder.hash),
            "invocation": (config["alora_invocation_tokens"], invocation),
            "choice of turns to read": (card.reads, job.reads),
        }
        for name, (parents, own) in pairs.items():
            if parents != own:
                problem, got = f"{card.rule} has another {name}", f"{parents}, {job.rule.id}: {own}"
                raise GuardError(problem, where=where, got=got, remedy=card.remedy)
        rank += config["r"]
    if rank > (limit := job.recipe.max_rank):
        problem = "the ranks of the parents are together above the engine's max_lora_rank"
        remedy = f"Raise it in the recipe's engine section to {rank}, or compose smaller ones"
        raise GuardError(problem, where=where, got=f"{rank} > {limit}", remedy=remedy)


def fit(work: Sequence[tuple[Job, Rows]]) -> Iterator[ComposedAdapter]:
    """The adapter of the one job of `work`. Raises as `check`."""
    ((job, rows),) = work
    check(job)
    job.open_scratch()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = load_served_base(job.recipe, torch.device(device))
    labels, losses = [row.label for row in rows.validation], dict[float, float]()
    for share in SHARES:
        composed = _composed(job, rows, base, share)
        losses[share] = calibrated_loss(composed.validation_logits, labels)
        composed.model.unload()
    of_parents: dict[str, tuple[Sequence[float], Calibration]] = {}
    for folder, card in job.parents.items():
        head = None
        if HEAD in card.files:
            head = Head.of_tensors(numpy.load_file(folder / HEAD), folder / HEAD, card.remedy)
        parent = TrainedAdapter(PeftModel.from_pretrained(base, str(folder)), job, head=head)
        logits = parent.logits(prompts_about(job, card.rule_text, rows.test))
        of_parents[card.rule] = logits, card.calibration
        parent.model.unload()
    best = min(losses, key=lambda share: losses[share])
    print(f"{job.name}: {best:g} of each parent's update, by the validation rows", flush=True)
    yield replace(_composed(job, rows, base, best), of_parents=of_parents)


def _composed(job: Job, rows: Rows, base: PreTrainedModel, share: float) -> ComposedAdapter:
    """The adapter of so much of each parent's update, with a head where the recipe has one."""
    folder = job.scratch / "composed"
    write_sum(dict.fromkeys(job.parents, share), folder)
    model = PeftModel.from_pretrained(base, str(folder))
    composed = ComposedAdapter(model, job)
    if job.settings.head is None:
        logits = composed.logits([row.prompt for row in rows.validation])
        return replace(composed, validation_logits=logits)
    trained = fitted(job, rows, composed.spans)
    return replace(composed, head=trained.head, validation_logits=trained.validation_logits)
