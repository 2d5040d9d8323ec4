"""A prompt that says what it shares is a list like any other."""

from __future__ import annotations

import numpy as np
from vllm_alora.shared_prompt import Prefix, SharedPrompt, prefix_of


def test_it_is_the_prefix_and_the_suffix_as_a_list_and_as_an_array() -> None:
    prefix = Prefix([5, 6, 7])
    prompt = SharedPrompt(prefix, [8, 9])
    assert prompt == [5, 6, 7, 8, 9]
    assert prompt.array().dtype == np.int32 and prompt.array().tolist() == prompt
    assert SharedPrompt(Prefix([]), [1]).array().tolist() == [1]


def test_a_copy_is_a_plain_list_that_may_grow() -> None:
    prompt = SharedPrompt(Prefix([5]), [6])
    copied = prompt.copy()
    copied.append(7)
    assert type(copied) is list and prompt == [5, 6]


def test_prompts_share_a_prefix_if_it_is_the_same_object() -> None:
    prefix = Prefix([5, 6])
    one, other = SharedPrompt(prefix, [7]), SharedPrompt(prefix, [8])
    assert prefix_of(one) is prefix_of(other)
    assert prefix_of(SharedPrompt(Prefix([5, 6]), [7])) is not prefix
    assert prefix_of([5, 6, 7]) is None and prefix_of(None) is None
