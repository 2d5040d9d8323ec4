"""What heads and adapters read of an encoder, and what they answer.

A trained encoder answers what plain PEFT and its words say. Own rows refit its head as that of a
frozen base, and nothing else of the adapter changes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import load_file
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, BertConfig, BertModel, XLMRobertaConfig

from guard.conversation.example import Example, Message, Split, write_examples
from guard.errors import GuardError
from guard.method import WORDS
from guard.prompt.decoder import Prompt
from guard.prompt.encoder import EncoderPromptBuilder
from guard.weights.head import NO_WORDS
from tests.plain_words import plain_word_logit
from tests.train.conftest import FILLER, MakeEncoderJob, data, encoder_recipe, mostly_generated
from train.encoder.bases import head_of
from train.encoder.model import load_encoder, reader_of, span_words
from train.encoder.trained import TrainedEncoder, adapted_spans, with_head_of_own_rows
from train.encoder.trainer import Training, fit
from train.examples import Row
from train.head.fit import FEWEST_OWN, fitted_to_own_rows
from train.head.regression import RowSpans, head_logits, read_rows
from train.job import Job
from train.methods import TRAINERS

ASKED = Message("user", "my order")
ANSWERED = Message("assistant", "a refund for books and food")


def test_heads_of_two_rules_read_each_its_own_turns(make_encoder_job: MakeEncoderJob) -> None:
    """What is kept for one is not given to the other."""
    of_all, of_assistant = make_encoder_job("head"), make_encoder_job("head", judged="assistant")
    prompt = of_all.builder.build([ASKED, ANSWERED], "")
    for _ in range(2):
        (whole,) = reader_of(of_all)([prompt])
        (narrow,) = reader_of(of_assistant)([prompt])
        assert len(whole.states) == whole.words.texts == 2
        np.testing.assert_array_equal(narrow.states, whole.states[1:])
        of_second = whole.words.rows == 1
        np.testing.assert_array_equal(narrow.words.keys, whole.words.keys[of_second])


SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}
SMALL |= {"num_hidden_layers": 1, "num_attention_heads": 2}
SHAPES = {"bert": BertConfig(**SMALL), "xlm-roberta": XLMRobertaConfig(**SMALL, pad_token_id=0)}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_frozen_encoder_gives_the_classifier_s_states(kind: str, tmp_path: Path) -> None:
    """An adapter's classifier begins as a head on these states."""
    torch.manual_seed(0)
    whole = AutoModelForTokenClassification.from_config(SHAPES[kind]).eval()
    whole.save_pretrained(tmp_path)
    recipe = encoder_recipe(tmp_path)
    ids = torch.arange(1, 9).unsqueeze(0)
    with torch.inference_mode():
        states = load_encoder(recipe, torch.device("cpu"))(input_ids=ids).logits
        assert torch.allclose(whole.classifier(states), whole(input_ids=ids).logits, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "rule", "spans"),
    [
        ("head", {"judged": "assistant"}, 1),
        ("head", {"judged": "conversation"}, 2),
        ("head", {"turns": "last"}, 1),
        ("lora", {"turns": "last"}, 1),
    ],
)
def test_what_does_not_count_is_not_learned(
    make_encoder_job: MakeEncoderJob, method: str, rule: dict[str, str], spans: int
) -> None:
    """Users say the word in every other row of both kinds; the label says whether the assistant
    does, who has the last turn.
    """
    job = make_encoder_job(method, max_steps=40, **rule)
    for split, count in (("train", 128), ("validation", 64), ("test", 64)):
        write_examples(job.data / f"{split}.jsonl", answers(split, count))
    rows = data(job)
    (trained,) = TRAINERS["encoder"][method].fit([(job, rows)])
    assert not isinstance(trained, GuardError)
    prompts = prompts_of(rows.test)
    is_flagged = np.array(trained.logits(prompts)) > 0
    assert np.mean(is_flagged == [bool(row.label) for row in rows.test]) > 0.95
    assert {len(row.states) for row in reader_of(job)(prompts)} == {spans}
    if isinstance(trained, TrainedEncoder):
        check_words_of_last_turn(trained, rows.test)


def check_words_of_last_turn(trained: TrainedEncoder, rows: Sequence[Row]) -> None:
    """Its words add to a logit what they say of that turn, and of no other."""
    prompts = [row.prompt for row in rows]
    added = np.subtract(trained.logits(prompts), replace(trained, words=NO_WORDS).logits(prompts))
    separator = cast(EncoderPromptBuilder, trained.job.builder).separator_id
    expected: list[float] = []
    for prompt in prompts:
        start = prompt.token_ids[:-1].index(separator) + 1  # of two turns the second's
        expected.append(plain_word_logit(trained.words.tensors(), prompt.token_ids[start:]))
    np.testing.assert_allclose(added, expected, atol=1e-4)
    assert np.ptp(expected) > 0.1


def answers(split: Split, count: int) -> list[Example]:
    rng = random.Random(split)
    rows: list[Example] = []
    for index in range(count):
        said = ("banana", "refund")[index // 2 % 2], ("banana", "refund")[index % 2]
        texts = [" ".join([*rng.sample(FILLER, 4), word]) for word in said]
        messages = (Message("user", texts[0]), Message("assistant", texts[1]))
        name = f"{split}-{index}"
        rows.append(Example(name, "toy", messages, index % 2, split, "toy", name))
    return rows


def test_a_base_without_a_layer_is_refused(tmp_path: Path) -> None:
    """Transformers would draw it, each time another one."""
    BertModel(SHAPES["bert"]).save_pretrained(tmp_path)
    BertConfig(**SMALL | {"num_hidden_layers": 2}).save_pretrained(tmp_path)
    with pytest.raises(GuardError, match=r"lacks weights of a token classifier: bert\.encoder"):
        load_encoder(encoder_recipe(tmp_path), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("judged", ["conversation", "assistant"])
def test_plain_peft_agrees(make_encoder_job: MakeEncoderJob, tmp_path: Path, judged: str) -> None:
    """And the head that is read from its classifier and words says the same of the same states."""
    job = make_encoder_job(judged=judged, max_steps=4, eval_steps=2)
    adapter, prompts = Training(job, data(job)).run(), prompts_of(data(job).test)
    adapter.save(tmp_path)
    plain_rows, expected = plain_answers(job, tmp_path, prompts)
    logits = adapter.logits(prompts)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    spans = adapted_spans(adapter, prompts)
    for ours, plain in zip(spans, plain_rows, strict=True):
        np.testing.assert_allclose(ours.states, plain.states, atol=1e-5)
    head = head_of(classifier_of(adapter.model), adapter.words)
    np.testing.assert_allclose(head_logits(head, spans), logits, atol=1e-5)


def prompts_of(rows: Sequence[Row]) -> list[Prompt]:
    return [row.prompt for row in rows]


def weights_of(trained: TrainedEncoder) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trained.model.named_parameters()}


def classifier_of(model: PeftModel) -> nn.Linear:
    base = cast(Any, model.get_base_model())
    return cast(nn.Linear, base.classifier.modules_to_save["default"])


def plain_answers(
    job: Job, folder: Path, prompts: Sequence[Prompt]
) -> tuple[list[RowSpans], list[float]]:
    """What the classifier of the adapter in `folder` is given in plain PEFT, one window after
    another, and the rows' logits. Words count of whom the rule judges.
    """
    base = AutoModelForTokenClassification.from_pretrained(job.recipe.base_path, num_labels=2)
    model = PeftModel.from_pretrained(base, str(folder)).eval()
    words = load_file(folder / WORDS)
    given: list[Tensor] = []
    classifier_of(model).register_forward_pre_hook(lambda layer, inputs: given.append(inputs[0]))
    builder = cast(EncoderPromptBuilder, job.builder)
    rows: list[RowSpans] = []
    row_logits: list[float] = []
    for prompt in prompts:
        windows = builder.windows(prompt.token_ids, job.reads)
        states: list[np.ndarray] = []
        logits: list[float] = []
        for window in windows:
            with torch.no_grad():
                no, yes = model(input_ids=torch.tensor([window.token_ids])).logits[0].T
            (tokens,) = given.pop()
            for start, end, speaker, _ in builder.spans(window):
                states.append(tokens[start:end].mean(0).numpy())
                logits.append(float((yes - no)[start:end].mean()))
                if job.rule.judged in ("conversation", speaker):
                    logits[-1] += plain_word_logit(words, window.token_ids[start:end])
        rows.append(RowSpans(np.array(states), span_words(builder, windows, job.reads)))
        row_logits.append(max(logits))
    return rows, row_logits


@pytest.mark.slow
def test_own_rows_alone_refit_the_head(make_encoder_job: MakeEncoderJob, tmp_path: Path) -> None:
    job = make_encoder_job(max_steps=4, eval_steps=2)
    rows = mostly_generated(data(job), own_training=24, own_validation=12)
    before = Training(job, rows).run()
    before.save(tmp_path)
    prior = head_of(classifier_of(before.model), before.words)
    weights = weights_of(before)
    (after,) = fit([(job, rows)])  # goes on where the first has ended
    assert isinstance(after, TrainedEncoder)

    def reader(prompts: Sequence[Prompt]) -> list[RowSpans]:
        return plain_answers(job, tmp_path, prompts)[0]

    own = read_rows(job, reader, rows.own().train)
    validation = read_rows(job, reader, rows.own().validation)
    expected, expected_before = fitted_to_own_rows(job, prior, own, validation)
    head = head_of(classifier_of(after.model), after.words)
    np.testing.assert_allclose(head.weight, expected.weight, atol=1e-3)
    np.testing.assert_allclose(head.words.weights, expected.words.weights, atol=1e-3)
    assert np.abs(head.weight - prior.weight).max() > 0.01
    for name, weight in weights_of(after).items():
        is_head = ".classifier." in name
        assert torch.equal(weight, weights[name]) != (is_head and "modules_to_save" in name), name
    prompts = prompts_of(rows.validation)
    spans = reader(prompts)
    np.testing.assert_allclose(after.logits(prompts), head_logits(expected, spans), atol=1e-3)
    logits = head_logits(expected_before, spans)
    np.testing.assert_allclose(after.validation_logits, logits, atol=1e-3)


@pytest.mark.slow
def test_with_too_few_own_rows_the_trained_head_stays(make_encoder_job: MakeEncoderJob) -> None:
    """Labels take turns, so of nine rows four are of one label."""
    job = make_encoder_job(max_steps=4, eval_steps=2)
    trained = Training(job, data(job)).run()
    weights = weights_of(trained)
    for own_training, own_validation in ((2 * FEWEST_OWN - 1, 12), (24, 3)):
        rows = mostly_generated(data(job), own_training, own_validation)
        assert with_head_of_own_rows(trained, rows) is trained
    assert all(torch.equal(weights[name], w) for name, w in weights_of(trained).items())
