from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from guard.prompt.builders import BUILDERS, prompt_builder
from guard.prompt.decoder import PromptBuilder
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.gliner2 import Gliner2PromptBuilder
from guard.recipe import Kind, load_recipe
from tests.gliner2_toy import gliner2_recipe, save_base


def test_every_kind_of_base_has_a_builder_of_its_own(tmp_path: Path) -> None:
    assert set(BUILDERS) == set(get_args(Kind))
    recipe = gliner2_recipe(save_base(tmp_path))
    assert type(prompt_builder(recipe)) is Gliner2PromptBuilder


@pytest.mark.parametrize(
    ("model", "builder"), [("minilm", EncoderPromptBuilder), ("tiny", PromptBuilder)]
)
def test_the_builder_is_that_of_the_recipe_s_kind(model: str, builder: type[PromptBuilder]) -> None:
    assert type(prompt_builder(load_recipe(model))) is builder
