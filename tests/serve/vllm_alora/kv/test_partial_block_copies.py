"""A step's copies of partial blocks, on tensors that stand for a runner's cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_alora.kv import partial_block_copies
from vllm_alora.kv.partial_block import COPIES_SHARES, Copies, Share
from vllm_alora.seam import Seam

pytestmark = pytest.mark.slow

BLOCK, HEADS, SIZE = 32, 2, 8


def runner_of(layers: list[torch.Tensor], blocks: int = 6) -> Any:
    return SimpleNamespace(
        kv_caches=layers,
        kv_cache_config=SimpleNamespace(num_blocks=blocks),
        cache_config=SimpleNamespace(block_size=BLOCK),
    )


def step_of(copies: Copies | None) -> Any:
    return SimpleNamespace(kv_connector_metadata=copies, total_num_scheduled_tokens=7)


@pytest.mark.parametrize(
    "execute", [partial_block_copies.execute_model_v1, partial_block_copies.execute_model_v2]
)
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_runner_copies_whole_blocks_before_and_after_its_step(execute: Seam, pieces: int) -> None:
    layers = [torch.randn(6 * pieces, 2, BLOCK // pieces, 8) for _ in range(2)]
    before = [layer.clone().unflatten(0, (6, pieces)) for layer in layers]
    runner = runner_of(layers)

    def fill(*_: Any) -> None:
        for layer in layers:
            layer.unflatten(0, (6, pieces))[2].fill_(5)

    execute.wrapper(lambda *_: None, runner, step_of(Copies(saves={0: 1})))
    execute.wrapper(fill, runner, step_of(Copies(loads={0: [3, 4]}, saves={0: 2})))
    for copies in (None, Copies(loads={0: [5]})):
        execute.wrapper(lambda *_: None, runner, step_of(copies))
    for layer, old in zip(layers, before, strict=True):
        now = layer.unflatten(0, (6, pieces))
        assert torch.equal(now[[0, 1, 3, 4]], old[[0, 1, 1, 1]]) and bool((now[[2, 5]] == 5).all())


def write(layer: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """What a backend does with [rows, heads, size]; a layer is [blocks, heads, slots, size]."""

    def plain(_layer: Any, key: Any, _value: Any, cache: torch.Tensor, slot_mapping: Any) -> None:
        size = cache.shape[2]
        for row, slot in zip(key, slot_mapping.tolist(), strict=True):
            cache[slot // size, :, slot % size] = row

    partial_block_copies.write_and_share(plain, None, rows, rows, layer, slots)


def execute(
    layers: list[torch.Tensor],
    rows: torch.Tensor,
    slots: torch.Tensor,
    copies: Copies,
    runner: Any = None,
) -> None:
    """A step that writes these rows in these layers; all are the runner's, but for a test's own."""

    def forward(*_: Any) -> None:
        for layer in layers:
            write(layer, rows, slots)

    runner = runner or runner_of(layers)
    partial_block_copies.execute_model_v1.wrapper(forward, runner, step_of(copies))


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, SIZE), (torch.bfloat16, SIZE), (torch.bfloat16, 6)]
)
def test_each_layer_copies_a_shared_tail_into_all_its_blocks(dtype: torch.dtype, size: int) -> None:
    """Three partial blocks: of the step, with four tokens computed before, complete before."""
    layers = [torch.randn(8, HEADS, BLOCK, size).to(dtype) for _ in range(2)]
    old = [layer.clone() for layer in layers]
    of_first = range(BLOCK, BLOCK + 12)
    of_second = range(2 * BLOCK + 4, 2 * BLOCK + 9)
    slots = torch.tensor([*of_first, *of_second, 3 * BLOCK + 9])  # the last is a sharer's own
    rows = torch.randn(len(slots), HEADS, size).to(dtype)
    shares = [Share(1, 0, 12, (4, 5)), Share(2, 4, 9, (3,)), Share(6, 7, 7, (7,))]
    copies = Copies(saves={0: 1, 1: 2}, shares=shares)
    execute(layers, rows, slots, copies, runner_of(layers, blocks=8))
    for layer, before in zip(layers, old, strict=True):
        assert torch.equal(layer[1, :, :12], rows[:12].transpose(0, 1))
        assert torch.equal(layer[[4, 5], :, :12], layer[[1, 1], :, :12])
        assert torch.equal(layer[3, :, :4], before[2, :, :4])
        assert torch.equal(layer[3, :, 4:9], rows[12:17].transpose(0, 1))
        assert torch.equal(layer[3, :, 9], rows[17])
        assert torch.equal(layer[7, :, :7], before[6, :, :7])
        assert torch.equal(layer[[0, 6]], before[[0, 6]])


def test_blocks_that_a_kernel_cuts_are_copied_whole() -> None:
    """Each is two of the kernel's."""
    layer = torch.randn(12, HEADS, BLOCK // 2, SIZE)
    before = layer.clone()
    rows, slots = torch.randn(20, HEADS, SIZE), torch.arange(BLOCK, BLOCK + 20)
    execute([layer], rows, slots, Copies(saves={0: 1}, shares=[Share(1, 0, 20, (4,))]))
    assert torch.equal(layer[8], rows[:16].transpose(0, 1))
    assert torch.equal(layer[9, :, :4], rows[16:].transpose(0, 1))
    untouched = [0, 1, 4, 5, 6, 7, 10, 11]
    assert torch.equal(layer[untouched], before[untouched])


def test_a_layer_that_shares_nothing_and_a_step_without_the_shared_tokens_are_errors() -> None:
    layers = [torch.randn(6, HEADS, BLOCK, SIZE) for _ in range(2)]
    rows, slots = torch.randn(5, HEADS, SIZE), torch.arange(BLOCK, BLOCK + 5)
    copies = Copies(saves={0: 1}, shares=[Share(1, 0, 5, (4,))])
    with pytest.raises(RuntimeError, match="1 of 2 layers"):
        execute(layers[:1], rows, slots, copies, runner_of(layers))
    write(layers[1], rows, slots)  # and what it left behind reaches no other step
    assert partial_block_copies._shared_blocks.get() is None
    with pytest.raises(RuntimeError, match="nonzero"):
        execute(layers[:1], rows, slots + 1, copies)


@pytest.mark.parametrize(
    ("attends_and_writes", "target", "is_wrapped"),
    [(False, None, True), (True, None, False), (False, "another layer", False)],
)
def test_a_layer_shares_if_its_backend_writes_keys_of_its_own_before_it_attends(
    attends_and_writes: bool, target: str | None, is_wrapped: bool
) -> None:
    written: list[tuple[Any, ...]] = []
    layer = SimpleNamespace(
        kv_sharing_target_layer_name=target,
        attn_backend=SimpleNamespace(forward_includes_kv_cache_update=attends_and_writes),
        impl=SimpleNamespace(do_kv_cache_update=lambda *args: written.append(args)),
    )
    partial_block_copies.attention_init.wrapper(lambda *_, **__: None, layer, 2, head_size=8)
    assert getattr(layer, COPIES_SHARES, False) == is_wrapped
    layer.impl.do_kv_cache_update(layer, "key", "value", "cache", "slots")
    assert written == [(layer, "key", "value", "cache", "slots")]
