"""How each method is trained: an entry of TRAINERS. Knows nothing of calibration or cards.

Torch and what stands on it are imported by an entry when it is used: `--help` takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from guard.errors import GuardError
from guard.prompt import Prompt
from train.examples import Rows
from train.job import Job


class Trained(Protocol):
    """The weights of one job, as long as the base that they stand on is in memory."""

    @property
    def validation_logits(self) -> Sequence[float]:
        """Raw logits of the validation rows in nats, if training computed them; else empty."""

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """Raw logits of `prompts` in nats: the reference that the served engine is held to."""

    def save(self, folder: Path) -> None:
        """Write the weights into `folder`, under the name that guard.method gives their file."""


class Trainer(Protocol):
    """How one method turns rows into weights.

    `trains_together`: whether `fit` shares work between the jobs that it is given; otherwise it is
    given one at a time.
    """

    trains_together: bool

    def check(self, job: Job) -> None:
        """Raise GuardError for settings or a base that `fit` would refuse, at little cost."""

    def fit(
        self, jobs: Sequence[tuple[Job, Rows]], processes: int
    ) -> Iterator[Trained | GuardError]:
        """Train all `jobs`, in this process's part of what `processes` share of the machine.

        Yields weights in the jobs' order, each to be used before the next is asked for, or what
        went wrong with this job alone. Raises GuardError for what stops all that are left.
        """


class LoraTrainer:
    """LoRAs on whole prompts, with TRL and PEFT."""

    trains_together = False

    def check(self, job: Job) -> None:
        """See Trainer."""
        from train.adapter.load import check_adapter

        check_adapter(job)

    def fit(
        self, jobs: Sequence[tuple[Job, Rows]], processes: int
    ) -> Iterator[Trained | GuardError]:
        """See Trainer."""
        from train.adapter import trl
        from train.adapter.trained import TrainedAdapter

        for job, rows in jobs:
            yield TrainedAdapter(trl.fit(job, rows), job)


class AloraTrainer:
    """aLoRAs on cached prefixes, many in one pass."""

    trains_together = True

    def check(self, job: Job) -> None:
        """See Trainer."""
        from train.adapter.load import check_adapter

        check_adapter(job)

    def fit(
        self, jobs: Sequence[tuple[Job, Rows]], processes: int
    ) -> Iterator[Trained | GuardError]:
        """See Trainer."""
        from train.prefix import trainer

        yield from trainer.fit(jobs, processes)


class HeadTrainer:
    """Logistic regressions on the frozen base's last state, loaded once for all of them."""

    trains_together = True

    def check(self, job: Job) -> None:
        """See Trainer."""
        from train.head import check_head

        check_head(job)

    def fit(
        self, jobs: Sequence[tuple[Job, Rows]], processes: int
    ) -> Iterator[Trained | GuardError]:
        """See Trainer."""
        from train import head

        yield from head.fit(jobs)


TRAINERS: dict[str, Trainer] = {
    "lora": LoraTrainer(),
    "alora": AloraTrainer(),
    "head": HeadTrainer(),
}
