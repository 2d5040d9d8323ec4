"""A trained adapter: what it answers, and how it is written. Knows nothing of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from guard.prompt.decoder import Prompt
from guard.recipe import Recipe
from train.adapter.predict import verdict_logits
from train.job import Job


@dataclass(frozen=True)
class TrainedAdapter:
    """A job's adapter in PEFT's layers on the base that serves it. `validation_logits` are log
    P(yes) - log P(no) of the job's validation rows on that base, in nats, where training computed
    them; else empty.
    """

    model: PeftModel
    job: Job
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """log P(yes) - log P(no) of `prompts` in nats, uncalibrated, through plain PEFT. Raises
        RuntimeError once the next adapter was asked for, as `save` does.
        """
        self._check_present()
        return verdict_logits(self.model, prompts, self.job.builder)

    def save(self, folder: Path) -> None:
        """Write PEFT's two files, which load in plain PEFT."""
        self._check_present()
        save_adapter(self.model, self.job.recipe, folder)

    def _check_present(self) -> None:
        """Neighbours stand on one base in turn: without its layers the base would answer alone."""
        if not any(isinstance(module, BaseTunerLayer) for module in self.model.modules()):
            raise RuntimeError(
                f"{self.job.name}: the adapter is gone, because the next one was asked for "
                "(`(trained,) = fit(...)` asks for it too)"
            )


def save_adapter(model: PeftModel, recipe: Recipe, folder: Path) -> None:
    """Write the adapter as PEFT's two files."""
    # As the recipe names the base: no path of this machine stands in adapter_config.json.
    model.peft_config["default"].base_model_name_or_path = recipe.base
    # By default PEFT would look the base up on the hub to decide about the embedding.
    model.save_pretrained(str(folder), save_embedding_layers=False)
    # PEFT's empty template; card.json is the card.
    (folder / "README.md").unlink(missing_ok=True)
