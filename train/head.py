"""Trains heads: a logistic regression on the frozen base's last state, without any adapter.

The state is the base's, after its final norm, at the prompt's last token, in float32. It is
standardised for the regression; what is written is folded back, so the raw logit in nats is weight
· state + bias. A base that gives several states of a prompt, an encoder one for each span, has the
logit of the highest; which span that is of a row, the rounds of a fit find out. Knows nothing of
thresholds, cards or files of examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.numpy import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm
from transformers import PreTrainedModel

from guard.errors import GuardError, did_you_mean
from guard.method import METHODS
from guard.prompt.decoder import Prompt
from train.base import load_served_base
from train.batch import BATCH_TOKENS, by_length, left_padded
from train.calibration.validation import validation_loss
from train.examples import Row, Rows
from train.job import Job
from train.refusals import refusals

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # values of C, unless the recipe states one
DEFAULTS = {"max_iter": 2000}  # sklearn's 100 do not converge for a large C
ROUNDS = 3  # of a fit on rows with several states

# Prompts -> the states of each, [states, hidden size] float32.
Reader = Callable[[Sequence[Prompt]], list[np.ndarray]]


@dataclass(frozen=True)
class TrainedHead:
    """A job's weights `[hidden size]` float32 and bias, and what gives the states that they
    read.
    """

    method: str
    weight: np.ndarray
    bias: np.float32
    reader: Reader
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        """weight · state + bias of `prompts` in nats, through plain transformers."""
        return _logits(self.reader(prompts), self.weight, self.bias)

    def save(self, folder: Path) -> None:
        """Write `weight` and `bias` [1] as the safetensors file that the method names."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": self.weight, "bias": np.array([self.bias])}
        save_file(tensors, folder / METHODS[self.method].weights)


def check_head(job: Job) -> None:
    """Raise GuardError for settings that a head does not read or LogisticRegression refuses."""
    for key in ("lora", "trainer", "early_stopping_patience", "min_steps"):
        if getattr(job.settings, key):
            problem = f"a head does not use {key} settings"
            raise GuardError(problem, where=job.where(key), remedy="Remove them")
    where = job.where("head")
    arguments = inspect.signature(LogisticRegression).parameters
    for key in job.settings.head:
        if key not in arguments:
            remedy = did_you_mean(key, arguments) or "See LogisticRegression of sklearn"
            problem = f"unknown key '{key}' for LogisticRegression"
            raise GuardError(problem, where=where, remedy=remedy)
    with refusals("LogisticRegression", where):
        for settings in _settings(job):
            LogisticRegression(**settings).fit([[0.0], [1.0], [0.0], [1.0]], [0, 1, 0, 1])


def fit(jobs: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedHead | GuardError]:
    """Train the heads of `jobs`, all on one decoder, and yield them in order; see `fit_on`."""
    recipe = jobs[0][0].recipe
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = load_served_base(recipe, device)
    yield from fit_on(lambda prompts: list(states(base, prompts)[:, None]), jobs)


def fit_on(reader: Reader, jobs: Sequence[tuple[Job, Rows]]) -> Iterator[TrainedHead | GuardError]:
    """Train the heads of `jobs` on the states that `reader` gives, and yield them in order.

    Of STRENGTHS, or of the C that the recipe states, the one with the lowest validation loss is
    kept, of equal ones the strongest regularisation. The same rows give the same weights.
    """
    for job, rows in jobs:
        job.open_scratch()
        try:
            yield fitted(job, rows, reader)
        except GuardError as error:
            yield error


def states(base: PreTrainedModel, prompts: Sequence[Prompt]) -> np.ndarray:
    """The base's last state at each prompt's last token, `[prompts, hidden size]` float32."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    width = base.config.get_text_config().hidden_size
    last = np.empty((len(prompts), width), dtype=np.float32)
    bar = tqdm(total=sum(lengths), desc="states", unit="token", unit_scale=True, leave=False)
    with torch.inference_mode(), bar:
        for batch in by_length(lengths, BATCH_TOKENS):
            tensors = left_padded([prompts[index].token_ids for index in batch])
            on_device = {name: tensor.to(base.device) for name, tensor in tensors.items()}
            output = cast(Any, base.base_model)(**on_device, use_cache=False)
            last[batch] = output.last_hidden_state[:, -1].float().cpu().numpy()
            bar.update(sum(lengths[index] for index in batch))
    return last


def fitted(job: Job, rows: Rows, reader: Reader) -> TrainedHead:
    """The head of one job. Raises GuardError for states that are not finite."""
    train = reader([row.prompt for row in rows.train])
    validation = reader([row.prompt for row in rows.validation])
    if not all(np.isfinite(states_of_row).all() for states_of_row in (*train, *validation)):
        remedy = "Set the recipe's dtype to bfloat16 or float32"
        raise GuardError("the base's states are not finite", where=job.name, remedy=remedy)
    heads: list[TrainedHead] = []
    losses: list[float] = []
    for settings in _settings(job):
        weight, bias = _regression(job, settings, train, np.array(_labels(rows.train)))
        head = TrainedHead(job.method, weight, bias, reader, _logits(validation, weight, bias))
        heads.append(head)
        losses.append(validation_loss(head.validation_logits, _labels(rows.validation)))
    return heads[int(np.argmin(losses))]


def _regression(
    job: Job, settings: dict[str, Any], train: list[np.ndarray], labels: np.ndarray
) -> tuple[np.ndarray, np.float32]:
    """Weight and bias for these settings.

    A row of several states enters first with their mean, then with its highest under the last fit,
    as when it is judged.
    """
    has_several = any(len(states_of_row) > 1 for states_of_row in train)
    inputs = np.stack([states_of_row.mean(axis=0) for states_of_row in train])
    for _ in range(ROUNDS if has_several else 1):
        weight, bias = _fit_once(job, settings, inputs, labels)
        highest = [rows[int(np.argmax(rows @ weight))] for rows in train]
        inputs = np.stack(highest)
    return weight, bias


def _fit_once(
    job: Job, settings: dict[str, Any], inputs: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.float32]:
    scaler = StandardScaler()
    standardised = scaler.fit_transform(inputs.astype(np.float64))
    regression = LogisticRegression(**settings)
    with refusals("LogisticRegression", job.where("head")):
        regression.fit(standardised, labels)
    weight = regression.coef_[0] / scaler.scale_
    bias = regression.intercept_[0] - weight @ scaler.mean_
    return weight.astype(np.float32), np.float32(bias)


def _settings(job: Job) -> list[dict[str, Any]]:
    stated = DEFAULTS | job.settings.head
    if "C" in stated:
        return [stated]
    return [stated | {"C": strength} for strength in STRENGTHS]


def _logits(
    states_of_rows: Sequence[np.ndarray], weight: np.ndarray, bias: np.float32
) -> list[float]:
    """Of each row that of its highest state."""
    logits: list[float] = []
    for rows in states_of_rows:
        products = rows.astype(np.float64) @ weight.astype(np.float64)
        logits.append(float(products.max() + np.float64(bias)))
    return logits


def _labels(rows: Sequence[Row]) -> list[int]:
    return [row.label for row in rows]
