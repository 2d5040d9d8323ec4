"""The part of GLiNER2 that is trained says what the package gliner2 says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from guard.errors import GuardError
from tests.gliner2_toy import fresh, gliner2_recipe, save_base
from train.encoder.gliner2 import gliner2_config, load_gliner2


def test_a_checkpoint_says_what_it_says_in_gliner2(tmp_path: Path) -> None:
    model = load_gliner2(gliner2_recipe(save_base(tmp_path)))
    reference = fresh()
    ids = torch.randint(1, 30000, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    with torch.inference_mode():
        logits = model(ids, mask)
        states = reference.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        expected = reference.classifier(states)
    assert logits.shape == (2, 20, 1)
    assert torch.allclose(logits[mask == 1], expected[mask == 1], atol=1e-6)
    assert not any(weight.requires_grad for weight in model.parameters())


def test_other_weights_are_refused(tmp_path: Path) -> None:
    """Those of another shape, those that lack a layer, and none at all."""
    file = save_base(tmp_path) / "model.safetensors"
    recipe, tensors = gliner2_recipe(tmp_path), load_file(file)
    config = gliner2_config(recipe)
    assert config.model_type == "deberta-v2" and config.hidden_size == 64
    lacking = {k: v for k, v in tensors.items() if not k.startswith("classifier")}
    of_another_shape = tensors | {"classifier.2.weight": torch.zeros(2, 128)}
    for content, told in ((lacking, r"no classifier\.0"), (of_another_shape, "size mismatch")):
        save_file(content, file)
        with pytest.raises(GuardError, match=rf"not those of a GLiNER2: .*{told}"):
            load_gliner2(recipe)
    file.unlink()
    with pytest.raises(GuardError, match=r"model\.safetensors is not there.*Download it"):
        load_gliner2(recipe)
