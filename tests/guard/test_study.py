"""Where a study's points lie, and that its file reads back."""

import argparse

import pytest

from guard.errors import GuardError
from guard.study import (
    add_recipe_arguments,
    named_recipes,
)


def test_recipes_are_named_with_all_of_their_methods_or_with_one() -> None:
    parser = argparse.ArgumentParser()
    add_recipe_arguments(parser)
    (tiny,) = named_recipes(parser.parse_args([]))
    assert list(tiny.methods) == ["lora", "alora", "head"]
    both = named_recipes(parser.parse_args(["--model", "tiny, minilm", "--method", "lora"]))
    found = [(recipe.name, list(recipe.methods)) for recipe in both]
    assert found == [("tiny", ["lora"]), ("minilm", ["lora"])]
    with pytest.raises(GuardError, match=r"lists no such method.*alora"):
        named_recipes(parser.parse_args(["--model", "minilm", "--method", "alora"]))
