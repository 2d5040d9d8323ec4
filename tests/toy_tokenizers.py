"""Small trained tokenizers. Tests only."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.trainers import BpeTrainer, UnigramTrainer


def byte_level_bpe(corpus: Iterable[str], special: list[str]) -> Tokenizer:
    """Of pairs of bytes, as Qwen's and RoBERTa's."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def unigram(corpus: Iterable[str], special: list[str], unknown: str) -> Tokenizer:
    """Of SentencePiece's kind, whose model has its control tokens as pieces too."""
    tokenizer = Tokenizer(Unigram())
    tokenizer.pre_tokenizer = Metaspace()
    trainer = UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token=unknown, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
