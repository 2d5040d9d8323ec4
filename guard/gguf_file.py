"""What a GGUF file says of a decoder, as transformers and vLLM read one: configuration, tokenizer,
chat template, weights in bfloat16. Knows nothing of recipes.

Sources: the metadata keys of ggml's specification; llama.cpp's `convert_hf_to_gguf.py`, whose
changes are undone here. transformers' own reader loads the weights alike
(tests/guard/test_gguf_file.py), and leaves out the split before the byte level in the tokenizer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from guard.base_weights import Tensor
from guard.errors import GuardError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor


# GGUF's architecture -> transformers' class.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Of this one llama.cpp stores queries and keys with the two halves of each head interleaved.
PERMUTED = "llama"
# The weights whose heads are, and the key of their number.
_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
# Key of the configuration -> key of the metadata, behind the architecture's name.
CONFIG_KEYS = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<name>\w+)\.weight")
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What splits a text before its bytes are merged, by `tokenizer.ggml.pre`.
SPLITS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
TOKENS = "tokenizer.ggml.tokens"
CONTROL, USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`


class GgufFile:
    """One file, opened. Raises GuardError for what is no such decoder."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._path = path
        try:
            self._reader: GGUFReader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise self._refusal(f"not a whole GGUF file: {error}", "Get it again") from error
        self._model_type = str(self._required("general.architecture"))
        if self._model_type not in ARCHITECTURES:
            problem = "a base of this architecture is not read from GGUF"
            remedy = f"Use one of {', '.join(ARCHITECTURES)}, or the base in safetensors"
            raise self._refusal(problem, remedy, self._model_type)
        scaling = self._value("rope.scaling.type", of_model=True)
        if scaling not in (None, "none"):
            problem = "scaled positions are not read from GGUF"
            raise self._refusal(problem, "Use the base in safetensors", scaling)

    def config(self) -> dict[str, Any]:
        """`config.json`."""
        sizes = {name: self._number(key) for name, key in CONFIG_KEYS.items()}
        head_dim = self._value("attention.key_length", of_model=True)
        theta = self._value("rope.freq_base", of_model=True)
        named = {tensor.name for tensor in self._reader.tensors}
        return {
            "architectures": [ARCHITECTURES[self._model_type]],
            "model_type": self._model_type,
            **sizes,
            "head_dim": head_dim or sizes["hidden_size"] // sizes["num_attention_heads"],
            "hidden_act": "silu",
            "vocab_size": len(self._required(TOKENS)),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta or 10_000.0},
            "tie_word_embeddings": "output.weight" not in named,
            "bos_token_id": self._value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._required("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self._value("tokenizer.ggml.padding_token_id"),
            "dtype": "bfloat16",
        }

    def other_files(self) -> dict[str, str]:
        """Name and content of the tokenizer's files and of the chat template."""
        tokens = self._required(TOKENS)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._number("context_length"),
            "clean_up_tokenization_spaces": False,
        }
        for name in ("bos", "eos", "unknown", "padding"):
            token_id = self._value(f"tokenizer.ggml.{name}_token_id")
            if token_id is not None:
                short = {"unknown": "unk", "padding": "pad"}.get(name, name)
                config[f"{short}_token"] = tokens[token_id]
        files = {
            "tokenizer.json": self._tokenizer(tokens).to_str(),
            "tokenizer_config.json": json.dumps(config, indent=2),
        }
        template = self._value("tokenizer.chat_template")
        if template:
            files["chat_template.jinja"] = template
        return files

    def tensors(self) -> Iterator[Tensor]:
        """All weights under transformers' names, in bfloat16."""
        for tensor in self._reader.tensors:
            match = _TENSOR.fullmatch(tensor.name)
            if match is None or match["name"] not in TENSORS:
                problem = f"a {self._model_type} has no such weights"
                raise self._refusal(problem, "Use the base in safetensors", tensor.name)
            prefix = "" if match["layer"] is None else f"model.layers.{match['layer']}."
            name = f"{prefix}{TENSORS[match['name']]}.weight"
            heads = 0
            if self._model_type == PERMUTED and match["name"] in _HEADS:
                heads = self._number(_HEADS[match["name"]])
            shape = tuple(int(size) for size in reversed(tensor.shape))
            read = partial(self._read, tensor, heads)
            yield Tensor(name, "BF16", shape, 2 * math.prod(shape), read)

    def _read(self, tensor: ReaderTensor, permuted_heads: int) -> bytes:
        from gguf import GGMLQuantizationType, dequantize, quantize

        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            remedy = "Use a file of another quantisation, such as Q8_0"
            raise self._refusal(str(error), remedy, tensor.name) from error
        if permuted_heads:
            pairs = values.reshape(permuted_heads, -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2)
        return quantize(values, GGMLQuantizationType.BF16).tobytes()

    def _tokenizer(self, tokens: list[str]) -> Tokenizer:
        kind = self._required("tokenizer.ggml.model")
        split = self._required("tokenizer.ggml.pre")
        if kind != "gpt2" or split not in SPLITS:
            problem = "a tokenizer of this kind is not read from GGUF"
            remedy = f"Known: gpt2 with {' or '.join(SPLITS)}; or use the base in safetensors"
            raise self._refusal(problem, remedy, f"{kind}, {split}")
        merges = [tuple(merge.split(" ")) for merge in self._required("tokenizer.ggml.merges")]
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[split])
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self._required("tokenizer.ggml.token_type")
        for token, token_kind in zip(tokens, kinds, strict=True):
            if token_kind in (CONTROL, USER_DEFINED):
                is_control = token_kind == CONTROL
                tokenizer.add_tokens([AddedToken(token, special=is_control, normalized=False)])
        return tokenizer

    def _value(self, key: str, *, of_model: bool = False) -> Any:
        """The metadata under a key, behind the architecture's name if it is `of_model`."""
        if of_model:
            key = f"{self._model_type}.{key}"
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def _required(self, key: str, *, of_model: bool = False) -> Any:
        value = self._value(key, of_model=of_model)
        if value is None:
            problem = f"the file does not state {key}"
            raise self._refusal(problem, "Use another file", self._model_type)
        return value

    def _number(self, key: str) -> Any:
        value = self._required(key, of_model=True)
        if not isinstance(value, int | float):
            raise self._refusal(f"{key} is no number", "Use another file", value)
        return value

    def _refusal(self, problem: str, remedy: str, got: object = None) -> GuardError:
        return GuardError(problem, where=self._path, got=got, remedy=remedy)
