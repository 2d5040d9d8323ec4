"""Distillation: shared-prefix rows equal plain prompts, targets sit at turn ends, an interrupted run resumes."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from guard.errors import GuardError
from guard.example import Message
from guard.prompt import PromptBuilder
from train.tiny.corpus import Source
from train.tiny.distil import (
    IGNORED,
    READERS,
    WEIGHTS,
    Distilled,
    Student,
    _unevenness,
    collate,
    distil,
    labels_of,
    new_student,
)
from train.tiny.lessons import Lesson, Lessons, sentences_of
from train.tiny.situations import ACTS, TOPICS, Heard, Question
from train.tiny.teacher import FOLDER, Teacher
from train.tiny.vocabulary import Vocabulary, cut_vocabulary, vocabulary_of

TALK = (
    Message("user", "good morning, i would like to buy a ticket"),
    Message("assistant", "sure, where do you want to go today?"),
    Message("user", "to the sea, and back before the evening comes"),
)

LABELS = labels_of(tuple(ACTS))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return cut_vocabulary(FOLDER, [message.content for message in TALK], 1500)


@pytest.fixture(scope="module")
def builder(vocabulary: Vocabulary) -> PromptBuilder:
    return PromptBuilder(vocabulary.tokenizer.backend_tokenizer)


def lesson(turns: int) -> Lesson:
    questions = [
        Question("The user must not buy anything.", 1),
        Question("The bot must never lie about the weather or the sea.", 0),
    ]
    return Lesson(
        list(TALK[:turns]),
        torch.randn(turns, 384),
        [[]] * turns,
        torch.empty(0, 384),
        questions,
        torch.randn(384),
    )


def toy_lessons(digest: str) -> Lessons:
    return Lessons(
        [Source("toy", [TALK] * 5, ("none",), digest)],
        ["sea", "ticket"],
        Teacher(),
        shapes=((30, 3, 1.0),),
    )


def test_a_row_of_shared_prefix_and_suffixes_gives_the_logits_of_plain_prompts(
    vocabulary: Vocabulary, builder: PromptBuilder
) -> None:
    torch.manual_seed(0)
    student = Student(new_student(vocabulary), LABELS).eval()
    lessons = [lesson(3), lesson(1)]
    batch = collate(lessons, builder, LABELS, random.Random(0))
    with torch.inference_mode():
        hidden = student.model.model(
            batch.ids, attention_mask=batch.mask, position_ids=batch.positions
        ).last_hidden_state
        shared = student.model.lm_head(hidden[batch.verdict_at[:, 0], batch.verdict_at[:, 1]])
        plain = torch.stack(
            [
                student.model(
                    torch.tensor([builder.build(one.messages, asked.rule_text).token_ids])
                ).logits[0, -1]
                for one in lessons
                for asked in one.questions
            ]
        )
    torch.testing.assert_close(shared, plain, rtol=1e-4, atol=1e-4)


def test_meaning_is_asked_for_at_the_line_break_that_ends_each_turn(
    vocabulary: Vocabulary, builder: PromptBuilder
) -> None:
    batch = collate([lesson(3)], builder, LABELS, random.Random(0))
    before = [
        vocabulary.tokenizer.decode(batch.ids[row, column - 1])
        for row, column in batch.meaning_at.tolist()
    ]
    at = {
        vocabulary.tokenizer.decode(batch.ids[row, column])
        for row, column in batch.meaning_at.tolist()
    }
    assert [text.removeprefix("##")[-1] for text in before] == ["t", "?", "s", ">"]
    assert at == {"\n"}
    assert len(batch.meanings) == 4


def test_meaning_is_asked_for_at_the_last_token_of_each_sentence_of_a_longer_turn(
    vocabulary: Vocabulary, builder: PromptBuilder
) -> None:
    text = "i would like to go. to the sea, back before the evening! where is the ticket?"
    split = sentences_of(text)
    assert split == [
        "i would like to go.",
        "to the sea, back before the evening!",
        "where is the ticket?",
    ]
    plain = lesson(1)
    one = dataclasses.replace(
        plain,
        messages=[Message("user", text), TALK[1]],
        turn_embeddings=torch.randn(2, 384),
        sentences=[split, []],
        sentence_embeddings=torch.randn(3, 384),
    )
    batch = collate([one], builder, LABELS, random.Random(0))
    target = {
        int(column): vector
        for (_, column), vector in zip(batch.meaning_at.tolist(), batch.meanings, strict=True)
    }
    ends = [
        column
        for column in sorted(target)
        if vocabulary.tokenizer.decode(batch.ids[0, column]) != "\n"
    ]
    assert [vocabulary.tokenizer.decode(batch.ids[0, column]) for column in ends] == [".", "!", "?"]
    torch.testing.assert_close(
        torch.stack([target[column] for column in ends]), one.sentence_embeddings
    )


def test_ends_are_labelled_with_the_speaker_and_in_a_generated_situation_with_the_act(
    builder: PromptBuilder,
) -> None:
    plain = lesson(2)
    text = "i promise to walk the puppy. he wrote 'i won't sign the lease'"
    heard = [
        [
            Heard("i promise to walk the puppy.", "promise", "pets", quoted=False),
            Heard(text, "refuse", "legal matters", quoted=True),
        ],
        [Heard(TALK[1].content, "joke", None, quoted=False)],
    ]
    one = dataclasses.replace(
        plain,
        messages=[Message("user", text), TALK[1]],
        sentences=[sentences_of(text), []],
        heard=heard,
    )
    one = dataclasses.replace(one, sentence_embeddings=torch.randn(2, 384))
    batch = collate([one, plain], builder, LABELS, random.Random(0))
    known = [
        [(name, value) for name, value in zip(LABELS, row, strict=True) if value != IGNORED]
        for row in batch.labels.tolist()
    ]
    found = [{name: LABELS[name][value] for name, value in row} for row in known]
    promise, refuse = (
        {"act": one.act, "topic": one.topic, "quoted": one.quoted, "role": "user"}
        for one in heard[0]
    )
    joke = {"act": "joke", "quoted": False, "role": "assistant"}
    assert found == [promise, refuse, refuse, joke, {}, {"role": "user"}, {"role": "assistant"}, {}]


def test_unevenness_is_zero_for_states_that_use_all_directions_alike_and_largest_for_equal_ones() -> (
    None
):
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
    losses = student.losses(
        collate([lesson(3), lesson(2)], builder, LABELS, random.Random(0)),
        builder.yes_id,
        builder.no_id,
    )
    assert losses.keys() == {*WEIGHTS, "turn_cosine", "verdict_accuracy"}
    for name in WEIGHTS:
        student.zero_grad()
        losses[name].backward(retain_graph=True)
        for layer in READERS:
            attention = student.model.model.layers[layer].self_attn
            for projection in (attention.k_proj, attention.v_proj):
                assert projection.weight.grad.abs().max() > 0, (name, layer)


def test_a_turn_of_several_lines_ends_at_its_last(
    vocabulary: Vocabulary, builder: PromptBuilder
) -> None:
    one = dataclasses.replace(
        lesson(2), messages=[Message("user", "first line\nsecond line"), TALK[1]]
    )
    batch = collate([one], builder, LABELS, random.Random(0))
    before = [
        vocabulary.tokenizer.decode(batch.ids[row, :column])
        for row, column in batch.meaning_at.tolist()
    ]
    assert before[0].endswith("second line")
    assert before[1].endswith("today?")


@pytest.mark.parametrize(
    "text", ["just one sentence here.", "no full stop", "", "hm. well. yes.", "v1.2 is out"]
)
def test_a_turn_of_one_sentence_has_no_sentence_targets(text: str) -> None:
    assert sentences_of(text) == []


def test_next_token_targets_are_the_prefix_shifted_by_one(builder: PromptBuilder) -> None:
    batch = collate([lesson(3)], builder, LABELS, random.Random(0))
    chosen = (batch.targets != IGNORED).nonzero()
    assert len(chosen) > 0
    for row, column in chosen.tolist():
        assert batch.targets[row, column] == batch.ids[row, column + 1]


def test_an_interrupted_run_resumes_to_the_same_weights(
    tmp_path: Path, vocabulary: Vocabulary, builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons = toy_lessons("0")

    def run(steps: int, checkpoint: str, **options: int) -> Distilled:
        return distil(
            vocabulary,
            lessons,
            builder,
            steps=steps,
            peak_lr=1e-3,
            checkpoint=tmp_path / checkpoint,
            save_every=2,
            **options,
        )

    whole = run(4, "whole.pt")
    run(4, "cut.pt", stop_after=2)
    resumed = run(4, "cut.pt")
    for name, weight in whole.student.state_dict().items():
        torch.testing.assert_close(
            resumed.student.state_dict()[name], weight, rtol=0, atol=0, msg=name
        )
    embeddings = whole.student.model.model.embed_tokens.weight
    torch.testing.assert_close(embeddings.detach(), vocabulary.embeddings, rtol=0, atol=0)
    assert (resumed.steps, resumed.figures) == (4, whole.figures)
    again = run(4, "cut.pt")
    assert (again.steps, again.figures) == (4, whole.figures)
    locals_: list[bool] = []
    monkeypatch.setattr(
        "train.tiny.distil.collate",
        lambda *args, local: (locals_.append(local), collate(*args, local=local))[1],
    )
    longer = run(40, "cut.pt", stop_after=5)
    assert (longer.steps, locals_) == (5, [False]), "a longer run goes on from a finished one"
    moved = [
        not torch.equal(weight, whole.student.state_dict()[name])
        for name, weight in longer.student.state_dict().items()
    ]
    assert sum(moved) > len(moved) / 2


def test_a_run_goes_on_from_the_weights_of_a_base_and_fits_new_heads_first(
    tmp_path: Path, vocabulary: Vocabulary, builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons, base = toy_lessons("0"), tmp_path / "base"
    torch.manual_seed(1)
    model = new_student(vocabulary)
    model.save_pretrained(base)
    vocabulary.tokenizer.save_pretrained(base)
    kept = vocabulary_of(base)
    assert kept.tokenizer.get_vocab() == vocabulary.tokenizer.get_vocab()
    torch.testing.assert_close(kept.embeddings, vocabulary.embeddings, rtol=0, atol=0)
    monkeypatch.setattr("train.tiny.distil.HEADS_ALONE", 2)

    def run(stop_after: int) -> Student:
        checkpoint = tmp_path / "checkpoint.pt"
        return distil(
            kept,
            lessons,
            builder,
            steps=9,
            peak_lr=1e-3,
            checkpoint=checkpoint,
            base=base,
            stop_after=stop_after,
        ).student

    heads_alone = run(2)
    for name, weight in heads_alone.model.state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=0, atol=0, msg=name)
    moved = run(3)
    assert not torch.equal(
        moved.model.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight
    )
    torch.testing.assert_close(
        moved.model.model.embed_tokens.weight.detach(), vocabulary.embeddings, rtol=0, atol=0
    )
    with pytest.raises(GuardError, match="got other base"):
        distil(kept, lessons, builder, steps=9, peak_lr=1e-3, checkpoint=tmp_path / "checkpoint.pt")


def test_a_checkpoint_of_other_corpora_words_or_settings_is_refused(
    tmp_path: Path, vocabulary: Vocabulary, builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons, checkpoint = toy_lessons("0"), tmp_path / "checkpoint.pt"
    distil(vocabulary, lessons, builder, steps=1, peak_lr=1e-3, checkpoint=checkpoint)
    smaller = cut_vocabulary(FOLDER, [message.content for message in TALK], 1400)
    with pytest.raises(GuardError, match=r"checkpoint\.pt: .* \(got other vocabulary\)\. Repeat"):
        distil(smaller, lessons, builder, steps=1, peak_lr=1e-3, checkpoint=checkpoint)
    with pytest.raises(GuardError, match="got other learning rate, seed"):
        distil(vocabulary, lessons, builder, steps=1, peak_lr=2e-3, checkpoint=checkpoint, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr("train.tiny.distil.TOPICS", [*list(TOPICS)[1:], "gardening"])
        with pytest.raises(GuardError, match="got other labels"):
            distil(vocabulary, lessons, builder, steps=1, peak_lr=1e-3, checkpoint=checkpoint)
    lessons.digests = ["1"]
    with pytest.raises(GuardError, match="got other corpora"):
        distil(vocabulary, lessons, builder, steps=1, peak_lr=1e-3, checkpoint=checkpoint)


def test_all_of_a_batch_moves_to_the_device(builder: PromptBuilder) -> None:
    batch = collate([lesson(3)], builder, LABELS, random.Random(0))
    moved = batch.to(torch.device("meta"))
    assert {tensor.device.type for tensor in vars(moved).values()} == {"meta"}
    assert moved.mask.shape == batch.mask.shape
