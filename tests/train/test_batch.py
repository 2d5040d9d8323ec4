"""Left padding and batches by tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from train.batch import by_length, left_padded


def test_every_row_ends_in_the_last_column_and_counts_positions_from_its_first_token() -> None:
    batch = left_padded([[5, 6, 7], [8]])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_batches_hold_every_row_once_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    batches = list(by_length(lengths, max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens


def test_rows_of_similar_length_share_a_batch_and_the_longest_come_first() -> None:
    assert list(by_length([1, 9, 2, 10], 20)) == [[3, 1], [2, 0]]
