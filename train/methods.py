"""How each method is trained on each kind of base: an entry of TRAINERS. Knows nothing of
calibration or cards. Torch and what stands on it are imported by an entry when it is used: `--help`
takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from guard.errors import GuardError
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


def later(name: str) -> Callable[..., Any]:
    """The function of this name, whose module is imported when it is called."""
    module, _, function = name.rpartition(".")

    def called(*arguments: Any) -> Any:
        return getattr(import_module(module), function)(*arguments)

    return called


def _fit_loras(work: TrainingWork) -> Iterator[Trained | GuardError]:
    from train.adapter import trl
    from train.adapter.trained import TrainedAdapter

    for job, rows in work:
        yield TrainedAdapter(trl.fit(job, rows), job)


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


ADAPTER = later("train.adapter.load.check_adapter")
ENCODER_ADAPTER = later("train.encoder.settings.check_adapter")
ENCODER_HEAD = later("train.encoder.settings.check_head")
TRAINERS: dict[Kind, dict[str, Trainer]] = {
    "decoder": {
        "lora": Trainer(ADAPTER, _fit_loras, trains_together=False),
        "alora": Trainer(ADAPTER, later("train.prefix.trainer.fit"), trains_together=True),
        "head": Trainer(
            later("train.head.fit.check_head"), later("train.head.fit.fit"), trains_together=True
        ),
    },
    "encoder": {
        "lora": Trainer(ENCODER_ADAPTER, _fit_encoder_loras, trains_together=False),
        # Beside the rule's LoRA: whichever is second finds the states that the first has read.
        "head": Trainer(ENCODER_HEAD, _fit_encoder_heads, trains_together=False),
    },
}
COMPOSED = "train.adapter.composed"
COMPOSER = Trainer(later(f"{COMPOSED}.check"), later(f"{COMPOSED}.fit"), trains_together=False)


def trainer_of(job: Job) -> Trainer:
    if job.is_composed:
        return COMPOSER
    return TRAINERS[job.recipe.kind][job.method]
