"""The small causal LM that is distilled, and what its losses are. Knows nothing of how it is
trained.

One forward pass, several losses. (1) The keys, and the values, of the reading layers at the end of
every turn, of every sentence of a longer turn and of every rule predict the teacher's embedding of
it: cosine, plus a contrast against the others of the step whose targets are the teacher's own
similarities, so that equal turns do no harm. Keys and values, not hidden states, because they are
all that an aLoRA can read of a conversation; as they are cached, after the rotation by position.
(2) The same predict who speaks and, in generated situations, the act, its topic and whether it is
only quoted: embeddings of sentences hold little of that. (3) Keys and values use all their
dimensions evenly, as in VICReg (Bardes et al., 2022): what stands in directions of small variance,
a low-rank update of the queries hardly finds. (4) The verdict token after each rule turn. (5)
Next-token prediction at a tenth of the positions, so that the states between turn ends also mean
something.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from train.tiny.batch import IGNORED, LabelValues, LessonBatch
from train.tiny.vocabulary import Vocabulary

READERS = (3, 4, 5)  # layers
# The attention's scale in reading layers: at 1, a suffix cannot single out one sentence of many.
SHARPNESS = 2.0
FIRST_NORM = 0.1  # the last layer's: MiniLM's embeddings are long, and logits should start small
CONTRAST_TEMPERATURE = 0.05
WEIGHTS = {
    "cosine": 1.0,
    "contrast": 0.5,
    "label": 0.3,
    "spread": 0.02,
    "verdict": 1.0,
    "next_token": 0.1,
}
STUDENT_SHAPE: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def new_student(vocabulary: Vocabulary) -> Qwen3ForCausalLM:
    """A Qwen3 model of 15.7 M parameters on the teacher's word embeddings, which stay frozen."""
    token_ids = vocabulary.tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(vocabulary.embeddings),
        eos_token_id=token_ids["<|im_end|>"],
        bos_token_id=token_ids["<|endoftext|>"],
        pad_token_id=token_ids["<|endoftext|>"],
        **STUDENT_SHAPE,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(vocabulary.embeddings)
        model.model.norm.weight.fill_(FIRST_NORM)
        for number in READERS:
            model.model.layers[number].self_attn.q_norm.weight.fill_(SHARPNESS)
    model.model.embed_tokens.weight.requires_grad_(False)
    return model


def student_of(base: Path) -> Qwen3ForCausalLM:
    """The model of a checkpoint that `export` wrote, to be trained on."""
    model = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.train()
    return model


def digest_of(base: Path) -> str:
    """SHA-256 of a checkpoint's weights."""
    return hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()


class Student(nn.Module):
    """The model, and a head for the keys and one for the values of each reading layer that maps
    them to the teacher's space.

    The heads are thrown away afterwards.
    """

    def __init__(self, model: Qwen3ForCausalLM, labels: LabelValues) -> None:
        super().__init__()
        self.model = model
        width = cast(int, model.config.num_key_value_heads) * model.config.head_dim
        self._widths = [384, *map(len, labels.values())]
        self.heads = nn.ModuleList(
            nn.Linear(width, sum(self._widths)) for _ in range(2 * len(READERS))
        )

    def losses(self, batch: LessonBatch, yes_id: int, no_id: int) -> dict[str, Tensor]:
        """The weighted losses of this step, and the unweighted `turn_cosine` and `verdict_accuracy`
        to report.
        """
        out = self.model.model(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=True,
        )
        chosen = batch.targets != IGNORED
        cosine, contrast, label, spread = self._reading_losses(
            out.past_key_values.layers, batch, chosen
        )
        hidden = out.last_hidden_state
        at_verdict = self.model.lm_head(hidden[batch.verdict_at[:, 0], batch.verdict_at[:, 1]])
        at_targets = self.model.lm_head(hidden[chosen])
        next_token = functional.cross_entropy(at_targets, batch.targets[chosen])
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

    def _reading_losses(
        self, layers: Iterable[Any], batch: LessonBatch, chosen: Tensor
    ) -> tuple[Tensor, ...]:
        """Cosine, contrast, label and spread, means over the cached keys and values of the layers;
        unweighted.

        Layers that are no readers only have a spread, over the `chosen` positions `[rows, length]`.
        """
        rows, columns = batch.meaning_at.unbind(1)
        similarity = _log_similarity(batch.meanings, batch.meanings)
        cosines, contrasts, labels, spreads = [], [], [], []
        for number, layer in enumerate(layers):
            # Keys and values: [rows, kv_heads, length, head_dim].
            for part, states in enumerate((layer.keys, layer.values)):
                by_position = states.transpose(1, 2)
                if number not in READERS:
                    spreads.append(_unevenness(by_position[chosen]))
                    continue
                at_ends = by_position[rows, columns]
                spreads.append(_unevenness(at_ends))
                head = self.heads[2 * READERS.index(number) + part]
                meaning, *scores = head(at_ends.flatten(1)).split(self._widths, dim=1)
                predicted = functional.normalize(meaning, dim=-1)
                cosines.append((predicted * batch.meanings).sum(-1).mean())
                contrasts.append(
                    _divergence(_log_similarity(predicted, batch.meanings), similarity)
                )
                labels += _label_losses(scores, batch.labels)
        losses = (cosines, contrasts, labels, spreads)
        return tuple(torch.stack(values).mean() for values in losses)


def _log_similarity(meanings: Tensor, choices: Tensor) -> Tensor:
    """Log probabilities `[n, m]` of the choices by their cosine to each meaning."""
    return (meanings @ choices.T / CONTRAST_TEMPERATURE).log_softmax(-1)


def _divergence(predicted: Tensor, targets: Tensor) -> Tensor:
    """Kullback-Leibler, both in log probabilities."""
    return functional.kl_div(predicted, targets, log_target=True, reduction="batchmean")


def _label_losses(scores: Iterable[Tensor], labels: Tensor) -> list[Tensor]:
    """Cross-entropy of each label over where it is known; 0 if it is nowhere. `labels` `[n,
    names]`.
    """
    losses: list[Tensor] = []
    for column, label_scores in enumerate(scores):
        losses.append(_cross_entropy(label_scores, labels[:, column]))
    return losses


def _cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    summed = functional.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
    return summed / (labels != IGNORED).sum().clamp(min=1)


def _unevenness(states: Tensor) -> Tensor:
    """How far the second moment of `[n, heads, width]` is from a multiple of the identity: 0 =
    even, width - 1 = all states alike.
    """
    width = states.shape[-1]
    moment = torch.einsum("nhi,nhj->hij", states, states)
    moment = moment * width / moment.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    return (moment - torch.eye(width, device=states.device)).square().sum((1, 2)).mean() / width
