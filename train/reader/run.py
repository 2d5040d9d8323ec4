"""Trains a base's reader and writes the folder that its recipe names: `make reader MODEL=smollm2`.

Interrupted, it goes on where it was. It is calibrated on validation rows and tested on others; what
their policies are about was in no policy of training.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import TYPE_CHECKING

from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs

if TYPE_CHECKING:
    from guard.recipe import Recipe
    from guard.weights.card import Card

SEED = 0
MOST_TESTED = 300  # units of validation and of the test, drawn at random


def run(recipe: Recipe, runs: Runs, folder: Path) -> Card:
    """Train the reader of `recipe` and write its files into `folder`."""
    from guard.conversation.example import SPLITS
    from guard.layout import fingerprint, split_files
    from guard.prompt.decoder import PromptBuilder
    from train.reader.export import METHOD, adapter_config, export
    from train.reader.rows import read, steps
    from train.reader.trainer import CHECKPOINT, ReaderInTraining, train

    builder = PromptBuilder.of(recipe)
    files = split_files(runs.reader / "data")
    units = {split: read(file, builder) for split, file in zip(SPLITS, files, strict=True)}
    for split in SPLITS[1:]:
        tested = min(MOST_TESTED, len(units[split]))
        places = random.Random(SEED).sample(range(len(units[split])), tested)
        units[split] = [units[split][place] for place in sorted(places)]
    reader = ReaderInTraining(recipe, adapter_config(recipe, builder), SEED)
    settings = recipe.settings(METHOD).lora
    inputs = fingerprint(*files, builder.hash, recipe.base_revision, settings)
    train(reader, steps(units["train"], SEED), runs.reader, inputs)
    card = export(reader, recipe, builder, files, units, folder)
    (runs.reader / CHECKPOINT).unlink()
    return card


@exits_cleanly
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.reader.run", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="the recipe (default: %(default)s)")
    name = parser.parse_args().model
    from guard.recipe import MODELS, load_recipe

    recipe = load_recipe(name)
    if recipe.reader is None:
        remedy = "Say where it is to be, as `reader: smollm2/reader`"
        raise GuardError("the recipe names no reader", where=f"recipe {name}", remedy=remedy)
    folder = MODELS / recipe.reader
    card = run(recipe, Runs(), folder)
    print(f"held out: {card.metrics['held_out']}\nwritten to {folder}")


if __name__ == "__main__":
    main()
