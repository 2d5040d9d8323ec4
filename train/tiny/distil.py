"""Distil sentence meaning into the student, and teach it to answer rule questions. Knows nothing of
corpora.

At first a turn sees only itself, later the whole conversation: without this the states learn to be
local very slowly. A run that goes on from an earlier base fits the new heads to it first, and no
turn is alone again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3ForCausalLM

from guard.layout import fingerprint
from guard.prompt.decoder import PromptBuilder
from train.tiny import loop
from train.tiny.batch import LabelValues, collate, labels_of
from train.tiny.lessons.lesson import Lessons
from train.tiny.student import WEIGHTS, Student, digest_of, new_student, student_of
from train.tiny.teacher import DEVICE
from train.tiny.vocabulary import Vocabulary

HEADS_ALONE = 40  # steps in which new heads are fitted to the weights of an earlier run
HEADS_LR = 3e-3  # in these steps
CLIP = 1.0


@dataclass(frozen=True)
class Curriculum:
    """What is distilled, how long, and how fast. `base`: the folder of a base to go on from.
    `phrasings`: of the rules whose phrase books the lessons are written from, see `phrasings_of`.
    """

    vocabulary: Vocabulary
    lessons: Lessons
    builder: PromptBuilder
    steps: int
    peak_lr: float
    base: Path | None = None
    phrasings: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def labels(self) -> LabelValues:
        """The labels that the heads predict for a turn or sentence besides its meaning."""
        return labels_of(self.lessons.acts)

    @property
    def made_from(self) -> dict[str, Any]:
        """What decides the student, but for the number of steps: a longer run goes on from a
        shorter one.
        """
        return {
            "base": digest_of(self.base) if self.base else None,
            "corpora": self.lessons.digests,
            "vocabulary": fingerprint(self.vocabulary.tokenizer.get_vocab()),
            "labels": fingerprint(self.labels),
            "phrasings": dict(self.phrasings),
            "learning rate": self.peak_lr,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Distilled:
    """A student, the steps it was trained for, and the last running means of what `Student.losses`
    reports.
    """

    student: Student
    steps: int
    figures: dict[str, float]


def distil(
    curriculum: Curriculum,
    checkpoint: Path,
    *,
    stop_after: int | None = None,
    save_every: int = loop.SAVE_EVERY,
) -> Distilled:
    """Train for all steps, or until step `stop_after` of them; resumes from `checkpoint` if it
    exists and saves to it as it goes.

    Raises GuardError if the checkpoint was made from something else. More steps are no reason: a
    longer run goes on from it.
    """
    learner = _Distillation(curriculum)
    steps = loop.train(
        learner,
        loop.Checkpoint(checkpoint, curriculum.made_from),
        steps=curriculum.steps,
        stop_after=stop_after,
        save_every=save_every,
    )
    return Distilled(learner.model, steps, learner.figures)


class _Distillation(loop.Learner):
    name = "distil"
    weights_name = "student"
    newest_share = 0.05
    model: Student

    def __init__(self, curriculum: Curriculum) -> None:
        self.figures = {}
        self._curriculum = curriculum
        self._planned = curriculum.steps  # of the run as first started
        self._heads_alone = HEADS_ALONE if curriculum.base else 0
        torch.manual_seed(curriculum.seed)
        self.model = Student(_begin(curriculum), curriculum.labels).to(DEVICE)
        groups = [
            *loop.parameter_groups(self.model.model.parameters()),
            *loop.parameter_groups(self.model.heads.parameters()),
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=curriculum.peak_lr, betas=loop.BETAS)

    def gradients(self, step: int) -> dict[str, float]:
        builder = self._curriculum.builder
        rng = random.Random(f"{self._curriculum.seed}:{step}")
        local = self._is_local(step, rng)
        lessons = self._curriculum.lessons.step(rng)
        batch = collate(lessons, builder, self._curriculum.labels, rng, local=local).to(DEVICE)
        losses = self.model.losses(batch, builder.yes_id, builder.no_id)
        sum((losses[name] for name in WEIGHTS), torch.zeros(())).backward()
        return {name: loss.item() for name, loss in losses.items()}

    def _is_local(self, step: int, rng: random.Random) -> bool:
        """Whether a step is local: always in the first 15 % of a new run, never after 40 %.

        The shares are of the run as first planned, so that a longer one does not go back to it.
        """
        if self._curriculum.base:
            return False
        return rng.random() < 1.6 - 4 * step / self._planned

    def clip(self) -> None:
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        nn.utils.clip_grad_norm_(trained, CLIP)

    def learning_rates(self, step: int) -> Sequence[float]:
        model_lr = heads_lr = self._curriculum.peak_lr * loop.share_of_peak(
            step, self._curriculum.steps, first=self._heads_alone
        )
        if step < self._heads_alone:
            model_lr = 0.0
            heads_lr = HEADS_LR
        return (model_lr, model_lr, heads_lr, heads_lr)

    def progress(self) -> dict[str, Any]:
        return {"planned": self._planned, "running": self.figures}

    def restore_progress(self, state: dict[str, Any]) -> None:
        self._planned = state["planned"]
        self.figures = state["running"]


def _begin(curriculum: Curriculum) -> Qwen3ForCausalLM:
    if curriculum.base:
        return student_of(curriculum.base)
    return new_student(curriculum.vocabulary)
