"""Words that are data, from `words.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from guard.files.yaml_file import Strict, load

WORDS_FILE = Path(__file__).with_name("words.yaml")


def _split_block(block: object) -> object:
    if isinstance(block, str):
        return tuple(block.splitlines())
    return block


Lines = Annotated[tuple[str, ...], BeforeValidator(_split_block)]


class Words(Strict):
    """What the file holds; of each irregular verb its -ing form and its past."""

    instructions: Lines
    master_keys: Lines
    irregular: dict[str, str]
    pronouns: dict[str, dict[str, str]]
    registers: dict[str, dict[str, str]]


WORDS = load(WORDS_FILE, Words)
