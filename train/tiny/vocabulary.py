"""The tiny base's tokenizer and embeddings: MiniLM's WordPiece cut to the words that matter, plus
Qwen3's control tokens.

Knows nothing of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNKNOWN, NEWLINE = "[UNK]", "\n"
# Qwen3's added tokens in Qwen3's order; those that it does not mark as special match in plain text
# too.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
           "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>", "<|video_pad|>"]  # fmt: skip
NOT_SPECIAL = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
               "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]  # fmt: skip
# The structure of Qwen3's chat template without its tool and reasoning branches.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)


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
    ordered = [
        piece
        for piece, _ in sorted(teacher_ids.items(), key=lambda item: item[1])
        if _is_useful(piece)
    ]
    counts = Counter(
        id for encoding in teacher_tokenizer.encode_batch(list(texts)) for id in encoding.ids
    )
    characters = [piece for piece in ordered if len(piece.removeprefix("##")) == 1]
    seen = sorted(
        (piece for piece in ordered if counts[teacher_ids[piece]] >= 5),
        key=lambda piece: -counts[teacher_ids[piece]],
    )
    room = size - len(SPECIAL) - len(NOT_SPECIAL) - 2
    kept = list(dict.fromkeys([*characters, *seen, *ordered]))[:room]
    pieces = [UNKNOWN, NEWLINE, *sorted(kept, key=teacher_ids.__getitem__)]
    tokenizer = _tokenizer(pieces)
    weights = load_file(teacher / "model.safetensors")
    words = (
        weights["embeddings.word_embeddings.weight"].float()
        + weights["embeddings.token_type_embeddings.weight"][0].float()
    )
    words = torch.nn.functional.layer_norm(
        words,
        words.shape[1:],
        weights["embeddings.LayerNorm.weight"].float(),
        weights["embeddings.LayerNorm.bias"].float(),
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(tokenizer), words.shape[1], generator=generator) * words.std()
    for index, piece in enumerate(pieces):
        if piece in teacher_ids:
            rows[index] = words[teacher_ids[piece]]
    return Vocabulary(tokenizer, rows)


def vocabulary_of(base: Path) -> Vocabulary:
    """That of a checkpoint that `export` wrote."""
    with safe_open(base / "model.safetensors", framework="pt") as weights:
        return Vocabulary(
            PreTrainedTokenizerFast.from_pretrained(base),
            weights.get_tensor("model.embed_tokens.weight").float(),
        )


def _is_useful(piece: str) -> bool:
    if piece.startswith("[") and piece.endswith("]") and len(piece) > 1:
        return False
    return all(ord(character) < 0x250 or 0x2000 <= ord(character) < 0x2100 for character in piece)


def _tokenizer(pieces: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(
        models.WordPiece(
            {piece: id for id, piece in enumerate(pieces)},
            unk_token=UNKNOWN,
            max_input_chars_per_word=64,
        )
    )
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
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
    )
