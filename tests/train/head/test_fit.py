"""The head is sklearn's logistic regression on the last state that plain transformers gives and on
sklearn's own TF-IDF.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from pytest import CaptureFixture, MonkeyPatch
from safetensors.numpy import load_file
from scipy.sparse import hstack
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler
from transformers import AutoModelForCausalLM

from guard.errors import GuardError
from guard.layout import is_current
from guard.method import METHODS, Method
from guard.prompt.decoder import Prompt
from guard.prompt.ngrams import ngram_rows
from guard.weights.card import load_card
from guard.weights.head import Head
from tests.plain_words import plain_word_logit
from tests.train.conftest import RULE, data, mostly_generated, with_recipe, with_settings
from train.examples import Row, Rows
from train.head.fit import STRENGTHS, WORD_SCALES, TrainedHead, check_head, fit, fitted, states
from train.head.regression import PRIOR_SCALE, RowSpans
from train.job import Job
from train.run import run


def with_head(job: Job, **head: object) -> Job:
    return with_settings(job, lora={}, head=head)


def trained(job: Job) -> TrainedHead:
    (head,) = fit([(job, data(job))])
    assert isinstance(head, TrainedHead)
    return head


def plain_states(base: Path, rows: tuple[Row, ...]) -> np.ndarray:
    """One prompt at a time, without padding."""
    model = AutoModelForCausalLM.from_pretrained(base).model
    last: list[torch.Tensor] = []
    with torch.inference_mode():
        for row in rows:
            last.append(model(torch.tensor([row.prompt.token_ids])).last_hidden_state[0, -1])
    return torch.stack(last).numpy()


def run_head(job: Job, folder: Path, seeds: tuple[int, ...] = (0,)) -> None:
    (folder / "toy.yaml").write_text(yaml.safe_dump(RULE.model_dump(mode="json")))
    run("toy", job.recipe, methods=["head"], seeds=seeds, runs=job.runs, rules=folder)


def plain_words(row: Row) -> list[str]:
    """The tokens of the conversation, and pairs of neighbours."""
    tokens = [str(token) for token in row.prompt.token_ids[: row.prompt.invocation_start]]
    return [*tokens, *(f"{first} {second}" for first, second in itertools.pairwise(tokens))]


def test_states_are_each_prompt_s_own(job: Job, toy_base: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(toy_base, dtype=torch.float32).eval()
    rows = data(job).train[:20]
    found = states(base, [row.prompt for row in rows])
    np.testing.assert_allclose(found, plain_states(toy_base, rows), atol=2e-5)


class SklearnRows:
    """Sklearn's regressions on training and validation rows, whose words have one vocabulary."""

    def __init__(self, rows: Rows, base: Path) -> None:
        every_row = (*rows.train, *rows.validation)
        self.states = plain_states(base, every_row)
        self.labels = np.array([row.label for row in every_row])
        tfidf = TfidfVectorizer(
            analyzer=plain_words, min_df=2, max_df=len(rows.train) - 1, sublinear_tf=True
        )
        self.words = tfidf.fit(rows.train).transform(every_row)
        self.is_training = np.array([row.split == "train" for row in every_row])
        self.is_own = np.array([not row.is_generated for row in every_row])

    def decisions(self, fitted_to: np.ndarray, prior: np.ndarray | None = None) -> list[np.ndarray]:
        """Of every setting's regression, for every row."""
        scaler = StandardScaler().fit(self.states[fitted_to])
        dense = scaler.transform(self.states) / math.sqrt(self.states.shape[1])
        if prior is not None:
            said = StandardScaler().fit(prior[fitted_to, None])
            dense = np.hstack([dense, PRIOR_SCALE * said.transform(prior[:, None])])
        of_settings: list[np.ndarray] = []
        for scale, strength in itertools.product(WORD_SCALES, STRENGTHS):
            inputs = hstack([dense, self.words * scale]).tocsr()
            regression = LogisticRegression(C=strength, max_iter=5000, tol=1e-8)
            regression.fit(inputs[fitted_to], self.labels[fitted_to])
            of_settings.append(regression.decision_function(inputs))
        return of_settings

    def losses(self, of_settings: list[np.ndarray], of_rows: np.ndarray) -> np.ndarray:
        summed: list[float] = []
        for logits in of_settings:
            p = 1 / (1 + np.exp(-logits[of_rows]))
            summed.append(log_loss(self.labels[of_rows], p, normalize=False))
        return np.array(summed)

    def best(self, of_settings: list[np.ndarray], of_rows: np.ndarray) -> np.ndarray:
        return of_settings[int(np.argmin(self.losses(of_settings, of_rows)))]


def test_a_head_is_the_best_of_sklearn_s_regressions(job: Job, toy_base: Path) -> None:
    rows = data(job)
    plain = SklearnRows(rows, toy_base)
    validation = ~plain.is_training
    expected = plain.best(plain.decisions(plain.is_training), validation)[validation]
    head = trained(job)
    assert max(expected) - min(expected) > 0.1
    np.testing.assert_allclose(head.validation_logits, expected, atol=1e-3)
    prompts = [row.prompt for row in rows.validation]
    np.testing.assert_allclose(head.logits(prompts), head.validation_logits, atol=1e-9)
    of_states = plain.states[validation] @ head.head.weight
    of_words = words_logits(head.head, rows.validation)
    assert np.std(of_words) > 0.01 and np.std(of_states) > 0.01  # both count
    np.testing.assert_allclose(of_states + of_words + head.head.bias, expected, atol=1e-3)


def test_a_head_of_own_rows_is_a_mean_of_sklearn_s_regressions(job: Job, toy_base: Path) -> None:
    """Of those that read what a regression of the generated rows says, and of that one. What the
    validation rows are calibrated on is the mean before it was fitted to them.
    """
    rows = mostly_generated(data(job), own_training=48, own_validation=16)
    plain = SklearnRows(rows, toy_base)
    validation, generated = ~plain.is_training, ~plain.is_own
    of_generated = plain.decisions(plain.is_training & generated)
    prior = plain.best(of_generated, validation & generated)
    before = [*plain.decisions(plain.is_training & plain.is_own, prior), prior]
    likelihoods = np.exp(-plain.losses(before, validation & plain.is_own))
    shares = likelihoods / likelihoods.sum()
    assert 0.01 < shares.max() < 0.99
    afterwards = [*plain.decisions(plain.is_own, prior), prior]
    (head,) = fit([(job, rows)])
    assert isinstance(head, TrainedHead)
    expected = shares @ np.array(before)[:, validation]
    np.testing.assert_allclose(head.validation_logits, expected, atol=5e-3)
    written = shares @ np.array(afterwards)[:, validation]
    prompts = [row.prompt for row in rows.validation]
    np.testing.assert_allclose(head.logits(prompts), written, atol=5e-3)
    assert np.abs(written - expected).max() > 0.1


@pytest.mark.parametrize(
    ("own_training", "own_validation", "is_one_fit"), [(9, 4, True), (10, 3, True), (10, 4, False)]
)
def test_few_own_rows(job: Job, own_training: int, own_validation: int, is_one_fit: bool) -> None:
    """All rows are then one fit. Labels take turns, so of ten rows five are of either."""
    (head,) = fit([(job, mostly_generated(data(job), own_training, own_validation))])
    assert isinstance(head, TrainedHead)
    expected = trained(job).validation_logits
    assert np.array_equal(head.validation_logits, expected) == is_one_fit


def words_logits(head: Head, rows: tuple[Row, ...]) -> np.ndarray:
    """What the words of the conversations say."""
    prefixes = [row.prompt.token_ids[: row.prompt.invocation_start] for row in rows]
    return np.array([plain_word_logit(head.tensors(), prefix) for prefix in prefixes])


def test_a_head_without_words_reads_states_alone(job: Job) -> None:
    job.open_scratch()
    base = AutoModelForCausalLM.from_pretrained(job.recipe.base_path).eval()

    def reader(prompts: Sequence[Prompt]) -> list[RowSpans]:
        words = ngram_rows([[]])
        return [RowSpans(state[None], words) for state in states(base, prompts)]

    head = fitted(job, data(job), reader).head
    assert head.weight.any() and not head.words


def test_a_stated_strength_is_kept_and_the_same_rows_give_the_same_weights(job: Job) -> None:
    strong, again, weak = (trained(with_head(job, C=c)) for c in (1e-4, 1e-4, 10.0))
    for name, tensor in strong.head.tensors().items():
        assert np.array_equal(tensor, again.head.tensors()[name])
    assert np.abs(strong.head.weight).sum() < 0.2 * np.abs(weak.head.weight).sum()


def test_an_entry_says_where_to_write(job: Job, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    another = Method("ridge", "ridge", "output", "ridge.safetensors", is_seeded=False)
    monkeypatch.setitem(METHODS, another.name, another)
    replace(trained(job), method="ridge").save(tmp_path / "ridge")
    assert [path.name for path in (tmp_path / "ridge").iterdir()] == ["ridge.safetensors"]


def test_the_folder_is_complete_and_its_predictions_are_those_of_its_weights(
    job: Job, toy_base: Path, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    run_head(job, tmp_path, seeds=(0, 1))
    assert [folder.name for folder in job.folder.parent.glob("head*")] == ["head"]
    names = ["card.json", "head.safetensors", "predictions.jsonl", "stage.json"]
    assert sorted(path.name for path in job.folder.iterdir()) == names
    head = Head.of_tensors(load_file(job.folder / "head.safetensors"), "its file", "")
    assert len(head.weight) == 64 and head.words
    card = load_card(job.folder)
    assert (card.method, card.seed, card.recipe) == ("head", 0, {"dtype": "float32", "head": {}})
    lines = (job.folder / "predictions.jsonl").read_text().splitlines()
    logits = [json.loads(line)["logit"] for line in lines]
    rows = data(job)
    both = (*rows.validation, *rows.test)
    expected = plain_states(toy_base, both) @ head.weight + words_logits(head, both) + head.bias
    np.testing.assert_allclose(logits, expected, atol=1e-3)
    assert not job.scratch.exists()
    capsys.readouterr()
    run_head(with_recipe(job, trainer={"learning_rate": 1.0}), tmp_path)
    assert capsys.readouterr().out == "toy head seed 0: up to date\n"
    assert is_current(job.folder, job.inputs)
    assert with_head(job, C=1.0).inputs != job.inputs


def test_states_that_are_not_finite_are_refused(job: Job, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(
        "train.head.fit.states", lambda base, prompts: np.full((len(prompts), 64), np.nan)
    )
    (error,) = fit([(job, data(job))])
    assert isinstance(error, GuardError)
    assert "the base's states are not finite" in str(error)


POSITIVE = "methods.head.head: C must be a positive number"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": {"CC": 1}}, "methods.head.head: unknown key 'CC' of a head"),
        *(({"head": {"C": value}}, POSITIVE) for value in ("big", 0, True, math.inf)),
        ({"lora": {"r": 8}}, "methods.head.lora: a head does not use lora settings"),
        ({"trainer": {"optim": "sgd"}}, "head.trainer: a head does not use trainer settings"),
        ({"early_stopping_patience": 2}, "methods.head.early_stopping_patience"),
        ({"min_steps": 300}, "methods.head.min_steps"),
    ],
)
def test_settings_of_others_stop(job: Job, settings: dict[str, object], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        check_head(with_settings(job, **{"lora": {}} | settings))
