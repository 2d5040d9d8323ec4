"""A language model's answer in the form that it has to have."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from pydantic import ConfigDict

from guard.endpoint import Completion
from guard.files.strict_json import read_json
from guard.files.yaml_file import Strict, validate

# Enough tokens and time for a conversation and its reasoning. The temperature is the model's own,
# so that no two texts are the same.
WRITING: dict[str, Any] = {"options": {"max_tokens": 4096}, "timeout_s": 600.0}


class Form(Strict):
    """An answer's fields. What a model adds of its own accord is left out."""

    model_config = ConfigDict(extra="ignore")


Filled = TypeVar("Filled", bound=Form)


def filled(completion: Completion, form: type[Filled], where: str) -> Filled:
    """The first JSON object of an answer in its form, or ValueError, RecursionError, GuardError."""
    return validate(_json_of(words(completion)), form, where=where)


def words(completion: Completion) -> str:
    """An answer without its thoughts. Raises ValueError where it is cut off or no text."""
    text = completion.text.rpartition("</think>")[2].strip()
    if completion.finish_reason == "length" or not text or "<think>" in text:
        raise ValueError("cut off")
    text.encode()  # half a surrogate pair: no request could quote it
    return text


def _json_of(text: str) -> Any:
    """The first JSON object in a text. Raises ValueError where there is none, or a key twice."""
    for start in (match.start() for match in re.finditer("{", text)):
        try:
            _, length = json.JSONDecoder().raw_decode(text[start:])
        except json.JSONDecodeError:
            continue
        return read_json(text[start : start + length])
    raise ValueError("no JSON object")
