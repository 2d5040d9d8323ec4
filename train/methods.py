"""How each method is trained on each kind of base: an entry of TRAINERS. Knows nothing of
calibration or cards. Torch and what stands on it are imported by an entry when it is used: `--help`
takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from guard.errors import GuardError
from guard.method import METHODS
from guard.prompt.decoder import Prompt
from guard.recipe import Kind
from train.examples import Rows
from train.job import Job


class Trained(Protocol):
    """The weights of one job, as long as the base that they stand on is in memory."""

    @property
    def validation_logits(self) -> Sequence[float]:
        """Raw logits of the validation rows in nats, if training computed them; else empty. If the
        weights were last fitted to these rows, the logits are those from before. The test rows'
        follow them in a study whose training computes these at less cost.
        """

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """Raw logits of `prompts` in nats: the reference that the served engine is held to."""

    def save(self, folder: Path) -> None:
        """Write the weights into `folder`, under the names that guard.method gives their files."""


TrainingWork = Sequence[tuple[Job, Rows]]


@dataclass(frozen=True)
class Trainer:
    """How one method turns rows into weights.

    `check` raises GuardError for settings or a base that `fit` would refuse, at little cost.

    `fit` trains all jobs of the work. It yields weights in the jobs' order, or a fault of this job
    alone, and raises GuardError for a fault that stops all jobs that are left. Each is to be used
    before the next is asked for, as a loop does; a list, or `(trained,) = fit(...)`, asks for the
    next.

    `trains_together`: whether `fit` shares something between the jobs that it is given; otherwise
    it is given one at a time.
    """

    check: Callable[[Job], None]
    fit: Callable[[TrainingWork], Iterator[Trained | GuardError]]
    trains_together: bool


def _check_decoder(job: Job) -> None:
    if METHODS[job.method].acts_from == "output":
        from train.head.fit import check_head

        check_head(job)
    else:
        from train.adapter.load import check_adapter

        check_adapter(job)


def _fit_loras(work: TrainingWork) -> Iterator[Trained | GuardError]:
    from train.adapter import trl
    from train.adapter.trained import TrainedAdapter

    for job, rows in work:
        yield TrainedAdapter(trl.fit(job, rows), job)


def _fit_aloras(work: TrainingWork) -> Iterator[Trained | GuardError]:
    from train.prefix import trainer

    yield from trainer.fit(work)


def _fit_heads(work: TrainingWork) -> Iterator[Trained | GuardError]:
    from train.head.fit import fit

    yield from fit(work)


def _check_encoder(job: Job) -> None:
    from train.encoder.settings import check_adapter, check_head

    if METHODS[job.method].acts_from == "output":
        check_head(job)
    else:
        check_adapter(job)


def _fit_encoder_loras(work: TrainingWork) -> Iterator[Trained | GuardError]:
    from train.encoder import trainer
    from train.examples import ADAPTER_EVERY, with_openings

    yield from trainer.fit([(job, with_openings(job, rows, ADAPTER_EVERY)) for job, rows in work])


def _fit_encoder_heads(work: TrainingWork) -> Iterator[Trained | GuardError]:
    from train.encoder.model import reader_of
    from train.examples import HEAD_EVERY, with_openings
    from train.head.fit import fit_on

    opened = [(job, with_openings(job, rows, HEAD_EVERY)) for job, rows in work]
    yield from fit_on(reader_of, opened)


TRAINERS: dict[Kind, dict[str, Trainer]] = {
    "decoder": {
        "lora": Trainer(_check_decoder, _fit_loras, trains_together=False),
        "alora": Trainer(_check_decoder, _fit_aloras, trains_together=True),
        "head": Trainer(_check_decoder, _fit_heads, trains_together=True),
    },
    "encoder": {
        "lora": Trainer(_check_encoder, _fit_encoder_loras, trains_together=False),
        # Beside the rule's LoRA: whichever is second finds the states that the first has read.
        "head": Trainer(_check_encoder, _fit_encoder_heads, trains_together=False),
    },
}


def trainer_of(job: Job) -> Trainer:
    return TRAINERS[job.recipe.kind][job.method]
