"""The student: shared-prefix rows equal plain prompts, every loss reaches the layers that are
read.
"""

import random

import pytest
import torch

from guard.prompt.decoder import PromptBuilder
from tests.train.tiny.conftest import LABELS, lesson
from train.tiny.batch import collate
from train.tiny.student import READERS, WEIGHTS, Student, _unevenness, new_student
from train.tiny.vocabulary import Vocabulary


def test_a_row_of_shared_prefix_and_suffixes_gives_the_logits_of_plain_prompts(
    vocabulary: Vocabulary, builder: PromptBuilder
) -> None:
    torch.manual_seed(0)
    model = Student(new_student(vocabulary), LABELS).eval().model
    lessons = [lesson(3), lesson(1)]
    batch = collate(lessons, builder, LABELS, random.Random(0))
    plain = []
    with torch.inference_mode():
        out = model.model(batch.ids, attention_mask=batch.mask, position_ids=batch.positions)
        rows, columns = batch.verdict_at.unbind(1)
        shared = model.lm_head(out.last_hidden_state[rows, columns])
        for drawn in lessons:
            for question in drawn.questions:
                prompt = builder.build(drawn.messages, question.rule_text)
                plain.append(model(torch.tensor([prompt.token_ids])).logits[0, -1])
    torch.testing.assert_close(shared, torch.stack(plain), rtol=1e-4, atol=1e-4)


def test_unevenness_is_zero_for_even_states_and_largest_for_equal_ones() -> None:
    torch.manual_seed(0)
    states = torch.randn(20_000, 2, 8)
    assert _unevenness(states) < 0.01
    assert _unevenness(torch.ones(5, 2, 8)) == pytest.approx(7.0)
    assert _unevenness(states * torch.tensor([3.0] + [1.0] * 7)) > 1.0


def test_every_loss_reaches_the_weights_of_the_reading_layers(
    vocabulary: Vocabulary, builder: PromptBuilder
) -> None:
    torch.manual_seed(0)
    student = Student(new_student(vocabulary), LABELS)
    batch = collate([lesson(3), lesson(2)], builder, LABELS, random.Random(0))
    losses = student.losses(batch, builder.yes_id, builder.no_id)
    assert losses.keys() == {*WEIGHTS, "turn_cosine", "verdict_accuracy"}
    for name in WEIGHTS:
        student.zero_grad()
        losses[name].backward(retain_graph=True)
        for layer in READERS:
            attention = student.model.model.layers[layer].self_attn
            for projection in (attention.k_proj, attention.v_proj):
                assert projection.weight.grad.abs().max() > 0, (name, layer)
