"""Distil sentence meaning into a small causal LM, and teach it to answer rule questions. Knows nothing of corpora.

One forward pass, several losses. (1) The keys, and the values, of the reading layers at the end of every turn, of every sentence of a
longer turn and of every rule predict the teacher's embedding of it: cosine, plus a contrast against the others of the step whose
targets are the teacher's own similarities, so that equal turns do no harm. Keys and values, not hidden states, because they are all
that an aLoRA can read of a conversation; as they are cached, after the rotation by position. (2) The same predict who speaks and, in
generated situations, the act, its topic and whether it is only quoted: embeddings of sentences hold little of that. (3) Keys and
values use all their dimensions evenly, as in VICReg (Bardes et al., 2022): what stands in directions of small variance, a low-rank
update of the queries hardly finds. (4) The verdict token after each rule turn. (5) Next-token prediction at a tenth of the positions,
so that the states between turn ends also mean something. At first a turn sees only itself, later the whole conversation: without
this curriculum the states learn to be local very slowly.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from guard.errors import GuardError
from guard.example import Message
from guard.files.atomic import atomic_write
from guard.layout import fingerprint
from guard.prompt import PromptBuilder
from train.tiny.lessons import Lesson, Lessons
from train.tiny.situations import TOPICS, Heard
from train.tiny.teacher import DEVICE
from train.tiny.vocabulary import Vocabulary

READERS = (3, 4, 5)  # layers
SHARPNESS = 2.0  # of the attention of the reading layers: at 1, a suffix cannot single out one sentence of many
CONTRAST_TEMPERATURE = 0.05
WEIGHTS = {
    "cosine": 1.0,
    "contrast": 0.5,
    "label": 0.3,
    "spread": 0.02,
    "verdict": 1.0,
    "next_token": 0.1,
}
IGNORED = -100
HEADS_ALONE, HEADS_LR = (
    40,
    3e-3,
)  # steps in which new heads are fitted to the weights of an earlier run, and their learning rate
Labels = dict[str, tuple[Any, ...]]  # name: values


def labels_of(acts: Sequence[str]) -> Labels:
    """What the end of a turn or sentence is asked for besides its meaning."""
    return {
        "role": ("user", "assistant", "tool"),
        "act": tuple(acts),
        "topic": tuple(TOPICS),
        "quoted": (False, True),
    }


@dataclass(frozen=True)
class Batch:
    """Rows of one prefix and several suffixes each; a suffix attends to the prefix and itself, and continues its positions.

    Shapes: `ids, positions, targets` `[rows, length]`; `mask` `[rows, 1, length, length]` bool; `meaning_at` and `verdict_at`
    `[n, 2]` (row, column); `meanings` `[n, 384]`; `verdicts` `[n]` token ids. `labels` `[n, names]`: what is known of what ends
    at a `meaning_at`, IGNORED where it is not.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    targets: Tensor
    meaning_at: Tensor
    meanings: Tensor
    labels: Tensor
    verdict_at: Tensor
    verdicts: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(*(tensor.to(device) for tensor in vars(self).values()))


@dataclass(frozen=True)
class Distilled:
    """A student, the steps it was trained for, and the last running means of what `Student.losses` reports."""

    student: Student
    steps: int
    figures: dict[str, float]


def new_student(vocabulary: Vocabulary) -> Qwen3ForCausalLM:
    """A Qwen3 model of 15.7 M parameters on the teacher's word embeddings, which stay frozen."""
    vocab = vocabulary.tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(vocabulary.embeddings), hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        eos_token_id=vocab["<|im_end|>"], bos_token_id=vocab["<|endoftext|>"], pad_token_id=vocab["<|endoftext|>"],
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(vocabulary.embeddings)
        model.model.norm.weight.fill_(
            0.1
        )  # MiniLM's embeddings are long: keeps the first logits small
        for number in READERS:
            model.model.layers[number].self_attn.q_norm.weight.fill_(SHARPNESS)
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def digest_of(base: Path) -> str:
    """SHA-256 of a checkpoint's weights."""
    return hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()


def _student_of(base: Path) -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.train()
    return model


@dataclass(frozen=True)
class _Row:
    """A lesson's prefix and suffixes one after another. `segment`: 0 prefix, 1… suffixes; `turn`: the turn an id belongs to, or -1."""

    ids: list[int]
    positions: list[int]
    segment: list[int]
    turn: list[int]
    turn_ends: list[int]  # column of each turn's last id
    bounds: list[int]  # where each suffix begins, and where the last one ends


def collate(
    lessons: Sequence[Lesson],
    builder: PromptBuilder,
    names: Labels,
    rng: random.Random,
    *,
    local: bool = False,
) -> Batch:
    """Rows of prefix + suffixes, padded on the right. `local`: a turn sees itself and the scaffold before it, not the other turns."""
    rows = [_row(lesson, builder) for lesson in lessons]
    ids, positions = (
        _padded([row.ids for row in rows], 0),
        _padded([row.positions for row in rows], 0),
    )
    segment, turn = (
        _padded([row.segment for row in rows], -1),
        _padded([row.turn for row in rows], -1),
    )
    targets = torch.full_like(ids, IGNORED)
    meaning_at, meanings, labels, verdict_at, verdicts = [], [], [], [], []
    for number, (lesson, row) in enumerate(zip(lessons, rows, strict=True)):
        for column in range(row.bounds[0] - 1):
            if rng.random() < 0.1:
                targets[number, column] = row.ids[column + 1]
        for column, known in _meant(lesson, row, builder, names):
            meaning_at.append((number, column))
            labels.append(known)
        meanings += [
            lesson.sentence_embeddings,
            lesson.turn_embeddings,
            lesson.rule_embedding[None],
        ]
        for end, one in zip(row.bounds[1:], lesson.questions, strict=True):
            verdict_at.append((number, end - 1))
            verdicts.append(builder.yes_id if one.label else builder.no_id)
    return Batch(
        ids, positions, _mask(segment, turn if local else None), targets, torch.tensor(meaning_at), torch.cat(meanings),
        torch.tensor(labels), torch.tensor(verdict_at), torch.tensor(verdicts),
    )  # fmt: skip


def _row(lesson: Lesson, builder: PromptBuilder) -> _Row:
    ids = builder.prefix_ids(lesson.messages)
    prefix, turns = len(ids), [len(builder.turn_ids(message)) for message in lesson.messages]
    before = prefix - 2 - sum(turns)  # <|im_end|> and a line break follow the last turn
    positions, segment, bounds = list(range(prefix)), [0] * prefix, [prefix]
    for number, one in enumerate(lesson.questions, start=1):
        suffix = builder.suffix_ids(one.rule_text)
        ids += suffix
        positions += range(prefix, prefix + len(suffix))
        segment += [number] * len(suffix)
        bounds.append(len(ids))
    turn = [-1] * before + [index for index, length in enumerate(turns) for _ in range(length)]
    turn += [-1] * (len(ids) - len(turn))
    return _Row(
        ids, positions, segment, turn, [before + end - 1 for end in accumulate(turns)], bounds
    )


def _meant(
    lesson: Lesson, row: _Row, builder: PromptBuilder, names: Labels
) -> Iterator[tuple[int, list[int]]]:
    """Columns that have a meaning, and their labels, in the order of the lesson's embeddings: sentences, turns, the first rule."""
    heard = lesson.heard or [[] for _ in lesson.messages]
    turns = list(zip(lesson.messages, lesson.sentences, heard, row.turn_ends, strict=True))
    for message, sentences, acts, end in turns:
        start = end + 1 - len(builder.turn_ids(message))
        known = {act.upto: act for act in acts}
        for text in accumulate(sentences, "{} {}".format):
            upto = builder.turn_ids(Message(message.role, text))[
                :-1
            ]  # all but the line break that ends the turn
            yield start + len(upto) - 1, _labels(names, message.role, known.get(text))
    for message, _, acts, end in turns:
        yield end, _labels(names, message.role, acts[-1] if acts else None)
    rule = row.ids[
        : row.bounds[1] - 1
    ]  # the line break that ends the rule turn is the last but one
    yield len(rule) - 1 - rule[::-1].index(row.ids[row.turn_ends[0]]), [IGNORED] * len(names)


def _mask(segment: Tensor, turn: Tensor | None) -> Tensor:
    """What each position sees, `[rows, 1, length, length]`: the prefix and its own segment; of the turns, if given, its own alone."""
    same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    if turn is not None:
        same &= (
            (turn[:, :, None] < 0) | (turn[:, None, :] < 0) | (turn[:, :, None] == turn[:, None, :])
        )
    length = segment.shape[1]
    mask = (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
    return mask | torch.eye(
        length, dtype=torch.bool
    )  # a padded position attends to itself, never to nothing


def _padded(rows: Sequence[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def _labels(names: Labels, role: str, heard: Heard | None) -> list[int]:
    known = {"role": role} | (
        {"act": heard.act, "topic": heard.topic, "quoted": heard.quoted} if heard else {}
    )
    return [
        values.index(known[name]) if known.get(name) in values else IGNORED
        for name, values in names.items()
    ]


class Student(nn.Module):
    """The model, and a head for the keys and one for the values of each reading layer that maps them to the teacher's space.

    The heads are thrown away afterwards.
    """

    def __init__(self, model: Qwen3ForCausalLM, labels: Labels) -> None:
        super().__init__()
        self.model = model
        width = cast(int, model.config.num_key_value_heads) * model.config.head_dim
        self._widths = [384, *map(len, labels.values())]
        self.heads = nn.ModuleList(
            nn.Linear(width, sum(self._widths)) for _ in range(2 * len(READERS))
        )

    def losses(self, batch: Batch, yes_id: int, no_id: int) -> dict[str, Tensor]:
        """The weighted losses of this step, and the unweighted `turn_cosine` and `verdict_accuracy` to report."""
        out = self.model.model(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=True,
        )
        chosen = batch.targets != IGNORED
        rows, columns = batch.meaning_at.unbind(1)
        wanted = (batch.meanings @ batch.meanings.T / CONTRAST_TEMPERATURE).log_softmax(-1)
        cosines, contrasts, named, spreads = [], [], [], []
        heads = iter(self.heads)
        for number, layer in enumerate(out.past_key_values.layers):
            for states in (layer.keys, layer.values):  # [rows, kv_heads, length, head_dim]
                by_position = states.transpose(1, 2)
                if number not in READERS:
                    spreads.append(_unevenness(by_position[chosen]))
                    continue
                at_ends = by_position[rows, columns]
                spreads.append(_unevenness(at_ends))
                meaning, *labels = next(heads)(at_ends.flatten(1)).split(self._widths, dim=1)
                predicted = functional.normalize(meaning, dim=-1)
                cosines.append((predicted * batch.meanings).sum(-1).mean())
                got = (predicted @ batch.meanings.T / CONTRAST_TEMPERATURE).log_softmax(-1)
                contrasts.append(
                    functional.kl_div(got, wanted, log_target=True, reduction="batchmean")
                )
                named += [
                    _cross_entropy(scores, batch.labels[:, column])
                    for column, scores in enumerate(labels)
                ]
        cosine, contrast, label, spread = (
            torch.stack(values).mean() for values in (cosines, contrasts, named, spreads)
        )
        hidden = out.last_hidden_state
        at_verdict = self.model.lm_head(hidden[batch.verdict_at[:, 0], batch.verdict_at[:, 1]])
        next_token = functional.cross_entropy(
            self.model.lm_head(hidden[chosen]), batch.targets[chosen]
        )
        verdict = functional.cross_entropy(at_verdict, batch.verdicts)
        correct = (at_verdict[:, yes_id] > at_verdict[:, no_id]) == (batch.verdicts == yes_id)
        return {
            "cosine": WEIGHTS["cosine"] * (1 - cosine),
            "contrast": WEIGHTS["contrast"] * contrast,
            "label": WEIGHTS["label"] * label * (len(self._widths) - 1),
            "spread": WEIGHTS["spread"] * spread,
            "verdict": WEIGHTS["verdict"] * verdict,
            "next_token": WEIGHTS["next_token"] * next_token,
            "turn_cosine": cosine.detach(),
            "verdict_accuracy": correct.float().mean().detach(),
        }


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Over the labels that are known; 0 if none is."""
    return functional.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum") / (
        labels != IGNORED
    ).sum().clamp(min=1)


def _unevenness(states: Tensor) -> Tensor:
    """How far the second moment of `[n, heads, width]` is from a multiple of the identity: 0 = even, width - 1 = all states alike."""
    width = states.shape[-1]
    moment = torch.einsum("nhi,nhj->hij", states, states)
    moment = moment * width / moment.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    return (moment - torch.eye(width, device=states.device)).square().sum((1, 2)).mean() / width


def distil(
    vocabulary: Vocabulary,
    lessons: Lessons,
    builder: PromptBuilder,
    *,
    steps: int,
    peak_lr: float,
    checkpoint: Path,
    base: Path | None = None,
    save_every: int = 50,
    stop_after: int | None = None,
    seed: int = 0,
) -> Distilled:
    """Train for `steps` steps, or until step `stop_after` of them; resumes from `checkpoint` if it exists and saves to it as it goes.

    Starts from the weights in the folder `base`, if given: the new heads are fitted to them first, and no turn is alone again.
    Raises GuardError if the checkpoint was made from something else. More steps are no reason: a longer run goes on from it.
    """
    labels = labels_of(lessons.acts)
    made_from = {
        "base": digest_of(base) if base else None,
        "corpora": lessons.digests,
        "vocabulary": fingerprint(vocabulary.tokenizer.get_vocab()),
        "labels": fingerprint(labels),
        "learning rate": peak_lr,
        "seed": seed,
    }
    torch.manual_seed(seed)
    student = Student(_student_of(base) if base else new_student(vocabulary), labels).to(DEVICE)
    trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [
                one for one in part.parameters() if one.requires_grad and (one.ndim > 1) == decays
            ],
            "weight_decay": 0.05 * decays,
        }
        for part in (student.model, student.heads)
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.95))
    heads_alone = HEADS_ALONE if base else 0
    start, planned = 0, steps
    running: dict[str, float] = {}
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True, map_location="cpu")
        _refuse_other(state.get("made_from", {}), made_from, checkpoint)
        student.load_state_dict(state["student"])
        optimizer.load_state_dict(state["optimizer"])
        start, planned, running = state["step"], state["planned"], state["running"]
    end = max(start, stop_after or steps)
    bar = tqdm(
        range(start, end), initial=start, total=steps, desc="distil", unit="step", mininterval=20
    )
    for step in bar:
        rng = random.Random(f"{seed}:{step}")
        # Always in the first 15 % of the run, never after 40 %: of the run as first planned, so that a longer one does not go back to it.
        local = not base and rng.random() < 1.6 - 4 * step / planned
        batch = collate(lessons.step(rng), builder, labels, rng, local=local).to(DEVICE)
        losses = student.losses(batch, builder.yes_id, builder.no_id)
        sum((losses[name] for name in WEIGHTS), torch.zeros(())).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        # Warm-up, plateau, decay over the last third: a plateau, so that a longer run can go on from any checkpoint.
        rate = peak_lr * min((step + 1 - heads_alone) / 60, 1.0, 3 * (steps - step) / steps)
        of_model, of_heads = (0.0, HEADS_LR) if step < heads_alone else (rate, rate)
        for group, lr in zip(
            optimizer.param_groups, (of_model, of_model, of_heads, of_heads), strict=True
        ):
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for name, value in losses.items():
            running[name] = 0.95 * running.get(name, value.item()) + 0.05 * value.item()
        bar.set_postfix({name: f"{value:.3f}" for name, value in running.items()}, refresh=False)
        if (step + 1) % save_every == 0 or step + 1 == end:
            state = {
                "student": student.state_dict(),
                "optimizer": optimizer.state_dict(),
                "made_from": made_from,
            }
            with atomic_write(checkpoint) as part:
                torch.save(
                    {**state, "step": step + 1, "planned": planned, "running": running}, part
                )
    return Distilled(student, end, running)


def _refuse_other(found: dict[str, Any], wanted: dict[str, Any], checkpoint: Path) -> None:
    """A student that goes on with other words or other corpora would be neither the old base nor the new one."""
    if other := [name for name, value in wanted.items() if found.get(name) != value]:
        raise GuardError(
            "the checkpoint of an earlier run was made from something else",
            where=checkpoint,
            got=f"other {', '.join(other)}",
            remedy="Repeat the command it was made with, delete it to start anew, or choose another folder with --work",
        )
