"""Distillation: an interrupted run resumes, one on a base fits its heads first, other inputs are
refused.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from tests.train.tiny.conftest import TALK, toy_lessons
from train.tiny.batch import collate
from train.tiny.distil import Curriculum, Distilled, distil
from train.tiny.lessons.situations import TOPICS
from train.tiny.student import Student, new_student
from train.tiny.teacher import FOLDER
from train.tiny.vocabulary import Vocabulary, cut_vocabulary, vocabulary_of

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _small(small_student: None) -> None:
    """Every student here is small."""


@pytest.fixture
def curriculum(vocabulary: Vocabulary, builder: PromptBuilder) -> Curriculum:
    return Curriculum(vocabulary, toy_lessons(), builder, steps=4, peak_lr=1e-3)


def moved(student: Student, before: Student) -> list[bool]:
    """Which weights are not what they were."""
    old = before.state_dict()
    return [not torch.equal(weight, old[name]) for name, weight in student.state_dict().items()]


def test_an_interrupted_run_resumes_to_the_same_weights(
    tmp_path: Path, curriculum: Curriculum, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(checkpoint: str, steps: int = 4, stop_after: int | None = None) -> Distilled:
        planned = replace(curriculum, steps=steps)
        return distil(planned, tmp_path / checkpoint, stop_after=stop_after, save_every=2)

    whole = run("whole.pt")
    run("cut.pt", stop_after=2)
    resumed = run("cut.pt")
    assert not any(moved(resumed.student, whole.student))
    embeddings = whole.student.model.model.embed_tokens.weight.detach()
    assert torch.equal(embeddings, curriculum.vocabulary.embeddings)
    assert (resumed.steps, resumed.figures) == (4, whole.figures)
    again = run("cut.pt")
    assert (again.steps, again.figures) == (4, whole.figures)
    locals_: list[bool] = []
    monkeypatch.setattr(
        "train.tiny.distil.collate",
        lambda *args, local: (locals_.append(local), collate(*args, local=local))[1],
    )
    longer = run("cut.pt", steps=40, stop_after=5)
    assert (longer.steps, locals_) == (5, [False]), "a longer run goes on from a finished one"
    changed = moved(longer.student, whole.student)
    assert sum(changed) > len(changed) / 2


def test_a_run_goes_on_from_the_weights_of_a_base_and_fits_new_heads_first(
    tmp_path: Path, curriculum: Curriculum, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = curriculum.vocabulary
    base, checkpoint = tmp_path / "base", tmp_path / "checkpoint.pt"
    torch.manual_seed(1)
    model = new_student(vocabulary)
    model.save_pretrained(base)
    vocabulary.tokenizer.save_pretrained(base)
    kept = vocabulary_of(base)
    assert kept.tokenizer.get_vocab() == vocabulary.tokenizer.get_vocab()
    assert torch.equal(kept.embeddings, vocabulary.embeddings)
    monkeypatch.setattr("train.tiny.distil.HEADS_ALONE", 2)
    on_base = replace(curriculum, vocabulary=kept, steps=9, base=base)
    heads_alone = distil(on_base, checkpoint, stop_after=2).student
    for name, weight in heads_alone.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    trained = distil(on_base, checkpoint, stop_after=3).student.model.model
    old = model.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(trained.layers[0].mlp.up_proj.weight, old)
    assert torch.equal(trained.embed_tokens.weight.detach(), vocabulary.embeddings)
    with pytest.raises(GuardError, match="got other base"):
        distil(replace(on_base, base=None), checkpoint)


def test_a_checkpoint_of_other_corpora_words_phrasings_or_settings_is_refused(
    tmp_path: Path, curriculum: Curriculum, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    curriculum = replace(curriculum, steps=1)
    distil(curriculum, checkpoint)
    smaller = cut_vocabulary(FOLDER, [message.content for message in TALK], 1400)
    with pytest.raises(GuardError, match=r"checkpoint\.pt: .* \(got other vocabulary\)\. Repeat"):
        distil(replace(curriculum, vocabulary=smaller), checkpoint)
    with pytest.raises(GuardError, match="got other learning rate, seed"):
        distil(replace(curriculum, peak_lr=2e-3, seed=1), checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr("train.tiny.batch.TOPICS", [*list(TOPICS)[1:], "gardening"])
        with pytest.raises(GuardError, match="got other labels"):
            distil(curriculum, checkpoint)
    with pytest.raises(GuardError, match="got other phrasings"):
        distil(replace(curriculum, phrasings={"toxicity": "of an edited phrase book"}), checkpoint)
    curriculum.lessons.digests = ["1"]
    with pytest.raises(GuardError, match="got other corpora"):
        distil(curriculum, checkpoint)
