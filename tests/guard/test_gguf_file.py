"""A decoder out of a GGUF file, against transformers' own reader of the same file."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from guard.errors import GuardError
from guard.gguf_file import GgufFile
from guard.made_base import made_from_gguf
from guard.recipe import load_recipe
from tests.toy_tokenizers import byte_level_bpe

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 64, 4, 2, 3, 96
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


CORPUS = ["yes and no, yes or no", "12 34 5678 words in a text"]


def write_gguf(
    path: Path, arch: str = "llama", *, split: str = "smollm", extra: str = "", scaling: str = ""
) -> None:
    """A random decoder, stored as llama.cpp stores it, in 8 bits."""
    random = np.random.default_rng(5)
    tokenizer = byte_level_bpe(CORPUS, CONTROLS)
    ids = tokenizer.get_vocab()
    head_dim = 128 if arch == "qwen3" else HIDDEN // HEADS  # of a qwen3 transformers reads no other
    writer = gguf.GGUFWriter(path, arch)
    prefix = f"{arch}."
    sizes = {"context_length": 256, "block_count": LAYERS, "embedding_length": HIDDEN}
    sizes |= {"feed_forward_length": FFN, "attention.head_count": HEADS}
    sizes |= {"attention.head_count_kv": KV_HEADS, "attention.key_length": head_dim}
    for key, size in sizes.items():
        writer.add_uint32(prefix + key, size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(sorted(ids, key=lambda token: ids[token]))
    kinds = [gguf.TokenType.CONTROL] * len(CONTROLS)
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (len(ids) - len(CONTROLS)))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    shapes = {"token_embd": (len(ids), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            **{"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)},
            **{"attn_q": (HEADS * head_dim, HIDDEN), "attn_output": (HIDDEN, HEADS * head_dim)},
            **dict.fromkeys(("attn_k", "attn_v"), (KV_HEADS * head_dim, HIDDEN)),
            **{"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)},
        }
        if arch == "qwen3":
            block |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    if extra:
        shapes[extra] = (HIDDEN,)
    for name, shape in shapes.items():
        values = random.normal(0, 0.2, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values + 1)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guard.made_base.CACHE", tmp_path / "cache")


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_the_decoder_computes_as_the_one_that_transformers_reads(arch: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", arch)
    folder = made_from_gguf(tmp_path / "toy.gguf", None, "recipe toy")
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="toy.gguf", dtype=torch.float32
    )
    rounded = {name: value.bfloat16().float() for name, value in theirs.state_dict().items()}
    theirs.load_state_dict(rounded)
    assert ours.state_dict().keys() == rounded.keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, rounded[name]), name
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("split", ["smollm", "qwen2"])
def test_the_text_is_split_as_the_file_says(split: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", "qwen3", split=split)
    files = GgufFile(tmp_path / "toy.gguf").other_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"])
    assert tokenizer.pre_tokenizer is not None
    text = "in 1234 words"
    found = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == ["in", "Ġ", "1", "2", "3", "4", "Ġwords"]
    assert tokenizer.encode("a<|im_end|>").tokens[-1] == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert files["chat_template.jinja"] == "{{ messages }}"


def test_what_is_no_such_decoder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.gguf"
    write_gguf(path, "gemma")
    with pytest.raises(GuardError, match=r"of this architecture .*got gemma.*llama, qwen3"):
        GgufFile(path)
    write_gguf(path, split="llama-bpe")
    with pytest.raises(GuardError, match=r"tokenizer of this kind .*gpt2, llama-bpe"):
        GgufFile(path).other_files()
    write_gguf(path, scaling="yarn")
    with pytest.raises(GuardError, match=r"scaled positions .*got yarn"):
        GgufFile(path)
    write_gguf(path, extra="rope_freqs")
    with pytest.raises(GuardError, match=r"no such weights \(got rope_freqs.weight"):
        list(GgufFile(path).tensors())
    for content in (path.read_bytes()[:2_000], b"", b"GGUF"):
        path.write_bytes(content)
        with pytest.raises(GuardError, match="not a whole GGUF file"):
            list(GgufFile(path).tensors())


@pytest.mark.slow
def test_smollm2_answers(tmp_path: Path) -> None:
    recipe = load_recipe("smollm2").model_copy(update={"layers": None})
    model = AutoModelForCausalLM.from_pretrained(recipe.base_path, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(Path(recipe.base_path) / "tokenizer.json"))
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    tokens = torch.tensor([tokenizer.encode(prompt).ids])
    with torch.no_grad():
        answer = model.generate(tokens, max_new_tokens=8, do_sample=False)[0, tokens.shape[1] :]
    assert tokenizer.decode(answer.tolist()) == "The capital of France is Paris."
    assert tokenizer.encode("yes").ids == [10407]
    assert tokenizer.encode("no").ids == [4607]
