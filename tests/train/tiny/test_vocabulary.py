"""The embedded base's tokenizer: Qwen3's control tokens over MiniLM's words."""

import torch

from train.tiny.teacher import FOLDER
from train.tiny.vocabulary import NOT_SPECIAL, SPECIAL, cut_vocabulary


def vocabulary(size: int = 2000):
    return cut_vocabulary(FOLDER, ["the unusual word zeppelin, zeppelin"] * 5, size)


def test_the_vocabulary_has_the_asked_size_and_one_embedding_row_each() -> None:
    cut = vocabulary()
    assert len(cut.tokenizer) == 2000
    assert cut.embeddings.shape == (2000, 384)
    assert torch.isfinite(cut.embeddings).all()


def test_every_control_token_is_one_id_at_the_end() -> None:
    tokenizer = vocabulary().tokenizer
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (*SPECIAL, *NOT_SPECIAL)]
    assert ids == list(range(2000 - len(ids), 2000))


def test_words_of_the_corpus_survive_the_cut_and_others_fall_to_pieces() -> None:
    tokenizer = vocabulary().tokenizer
    assert tokenizer.tokenize("Zeppelin") == ["zeppelin"]
    assert len(tokenizer.tokenize("dirigible")) > 1
    assert tokenizer.unk_token not in tokenizer.tokenize("dirigible @#%& 0123456789 café")


def test_a_line_break_is_a_token_and_other_white_space_is_not() -> None:
    assert vocabulary().tokenizer.tokenize("a\n b \t c\n") == ["a", "\n", "b", "c", "\n"]


def test_the_same_word_has_the_teachers_row_whatever_the_cut() -> None:
    small, large = vocabulary(2000), vocabulary(3000)
    row = [
        cut.embeddings[cut.tokenizer.convert_tokens_to_ids("zeppelin")] for cut in (small, large)
    ]
    assert torch.equal(row[0], row[1])


def test_the_chat_template_has_qwens_structure() -> None:
    rendered = vocabulary().tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert (
        rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
