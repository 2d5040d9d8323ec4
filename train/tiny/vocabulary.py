"""The tiny base's tokenizer and embeddings: MiniLM's WordPiece cut to the words that matter, plus
Qwen3's control tokens.

Knows nothing of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNKNOWN = "[UNK]"
NEWLINE = "\n"
# Qwen3's added tokens in Qwen3's order; those that it does not mark as special match in plain text
# too.
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
NOT_SPECIAL = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
# The structure of Qwen3's chat template without its tool and reasoning branches.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
MIN_OCCURRENCES = 5  # a piece with as many in the corpora comes before those frequent in English


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the embedding row of each of its ids, float32 `[len(tokenizer), hidden]`."""

    tokenizer: PreTrainedTokenizerFast
    embeddings: torch.Tensor


def cut_vocabulary(teacher: Path, texts: Iterable[str], size: int) -> Vocabulary:
    """Keep the `size` pieces that matter most.

    Kept are every single character the teacher knows in Latin script or punctuation, every piece
    that occurs in `texts` at least five times, then the rest in the teacher's own order, which is
    by frequency in English.
    """
    teacher_tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    teacher_tokenizer.no_truncation()
    teacher_tokenizer.no_padding()
    teacher_ids = teacher_tokenizer.get_vocab()
    room = size - len(SPECIAL) - len(NOT_SPECIAL) - 2
    chosen = _by_importance(teacher_ids, _counts(teacher_tokenizer, texts))[:room]
    pieces = [UNKNOWN, NEWLINE, *sorted(chosen, key=teacher_ids.__getitem__)]
    tokenizer = _tokenizer(pieces)
    words = _word_embeddings(teacher)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(tokenizer), words.shape[1], generator=generator) * words.std()
    for index, piece in enumerate(pieces):
        if piece in teacher_ids:
            rows[index] = words[teacher_ids[piece]]
    return Vocabulary(tokenizer, rows)


def _counts(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[int]:
    """How often each id occurs in the texts."""
    counts: Counter[int] = Counter()
    for encoding in tokenizer.encode_batch(list(texts)):
        counts.update(encoding.ids)
    return counts


def _by_importance(teacher_ids: Mapping[str, int], counts: Counter[int]) -> list[str]:
    """The useful pieces: single characters, those of the texts by how often they occur, the rest in
    the teacher's order.
    """
    ordered = [
        piece for piece in sorted(teacher_ids, key=teacher_ids.__getitem__) if _is_useful(piece)
    ]
    characters = [piece for piece in ordered if len(piece.removeprefix("##")) == 1]
    frequent = [piece for piece in ordered if counts[teacher_ids[piece]] >= MIN_OCCURRENCES]
    frequent.sort(key=lambda piece: -counts[teacher_ids[piece]])
    return list(dict.fromkeys([*characters, *frequent, *ordered]))


def _word_embeddings(teacher: Path) -> torch.Tensor:
    """The input of the teacher's first layer for each of its ids, but for the position: float32
    `[ids, hidden]`.
    """
    weights = load_file(teacher / "model.safetensors")
    words = weights["embeddings.word_embeddings.weight"].float()
    words = words + weights["embeddings.token_type_embeddings.weight"][0].float()
    scale = weights["embeddings.LayerNorm.weight"].float()
    bias = weights["embeddings.LayerNorm.bias"].float()
    return torch.nn.functional.layer_norm(words, words.shape[1:], scale, bias)


def vocabulary_of(base: Path) -> Vocabulary:
    """The vocabulary of a checkpoint that `export` wrote."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    with safe_open(base / "model.safetensors", framework="pt") as weights:
        embeddings = weights.get_tensor("model.embed_tokens.weight").float()
    return Vocabulary(tokenizer, embeddings)


def _is_useful(piece: str) -> bool:
    if piece.startswith("[") and piece.endswith("]") and len(piece) > 1:
        return False
    return all(ord(character) < 0x250 or 0x2000 <= ord(character) < 0x2100 for character in piece)


def _tokenizer(pieces: list[str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(pieces),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
    )


def _backend(pieces: list[str]) -> Tokenizer:
    ids = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=64))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=False, handle_chinese_chars=True, strip_accents=True, lowercase=True
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[^\S\n]+"), "removed"),
            pre_tokenizers.Split(NEWLINE, "isolated"),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    backend.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL]
    )
    return backend
