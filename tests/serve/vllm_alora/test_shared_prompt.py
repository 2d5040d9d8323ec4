"""A prompt that says what it shares is read like a list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_alora.shared_prompt import Prefix, SharedPrompt, prefix_of


def test_it_is_the_prefix_and_the_suffix_as_an_array_too() -> None:
    prompt = SharedPrompt(Prefix([5, 6, 7]), [8, 9])
    assert [*prompt] == [5, 6, 7, 8, 9] and prompt == [5, 6, 7, 8, 9] and len(prompt) == 5
    assert np.array(prompt).dtype == np.int32 and np.array(prompt).tolist() == [*prompt]
    row = np.zeros(7, np.int64)
    row[1:6] = prompt
    assert row.tolist() == [0, 5, 6, 7, 8, 9, 0]


@given(
    shared=st.lists(st.integers(0, 9), max_size=6),
    own=st.lists(st.integers(0, 9), max_size=6),
    start=st.none() | st.integers(-15, 15),
    stop=st.none() | st.integers(-15, 15),
    step=st.sampled_from([None, 1, 2, -1]),
)
def test_it_is_read_like_a_list(
    shared: list[int], own: list[int], start: int | None, stop: int | None, step: int | None
) -> None:
    prompt, tokens = SharedPrompt(Prefix(shared), own), [*shared, *own]
    assert prompt[start:stop:step] == tokens[start:stop:step]
    for index in range(-len(tokens), len(tokens)):
        assert prompt[index] == tokens[index]
    for outside in (len(tokens), -len(tokens) - 1):
        with pytest.raises(IndexError):
            prompt[outside]


def test_a_copy_grows_by_itself_and_shares_the_prefix() -> None:
    prompt = SharedPrompt(Prefix([5]), [6])
    grown = prompt.copy()
    grown.append(7)
    grown.extend([8, 9])
    assert grown == [5, 6, 7, 8, 9] and prompt == [5, 6]
    assert len(grown) == 5 and len(prompt) == 2
    # By identity: an equal prefix is another one.
    assert prefix_of(grown) is prefix_of(prompt) is prompt.prefix
    assert prefix_of([5, 6, 7]) is None and prefix_of(None) is None
