"""Seams: on a GPU the low-rank kernels are launched where there is work, not over the whole step.

vLLM launches its Triton kernels over (all tokens of the step) x (slots + 1): a program for every
tile of tokens and every slot, and nearly all of them find that their adapter has no such tokens.
With aLoRA the conversation's tokens have no adapter, and a rule's suffix is one tile: of 190.6
million programs for 100 rules on 5,000 tokens 2.4 million have work. Here a launch covers as many
tiles as the adapter with most tokens has, and as many adapters as are in the step. Each program
that is left computes what it did before. Captured graphs keep the sizes that they were captured
with. Can go when vLLM bounds its grid so (a TODO in its `lora_shrink_op.py`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
from vllm.triton_utils import triton

from .seam import SeamError, seam

KERNELS = ((lora_shrink_op, "_lora_shrink_kernel"), (lora_expand_op, "_lora_expand_kernel"))


class Work(NamedTuple):
    """What a step's adapters have to do: tokens of the one with most, and how many ids the kernels
    read, "no adapter" included.
    """

    tokens: int
    ids: int


# Address of a wrapper's `active_lora_ids` -> its step's work: a kernel is given no more of its
# wrapper than tensors.
_work: dict[int, Work] = {}


def work_of(adapters: Iterable[int]) -> Work | None:
    """The work of a step, from the adapter of each of its tokens, 0 for none; None where there is
    no adapter.
    """
    tokens: Counter[int] = Counter()
    for adapter, run in itertools.groupby(adapters):
        tokens[adapter] += sum(1 for _ in run)
    ids = len(tokens)
    del tokens[0]
    if not tokens:
        return None
    return Work(max(tokens.values()), ids)


class BoundedKernel:
    """One of vLLM's low-rank kernels, launched over its step's work.

    Raises SeamError where the kernel's parameters have other names.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        names = list(kernel.arg_names)
        missing = {"M", "lora_ids", "BLOCK_M"} - set(names)
        if missing:
            raise SeamError(f"vllm_alora: a low-rank kernel has no {', '.join(sorted(missing))}")
        self._m, self._ids = names.index("M"), names.index("lora_ids")
        self._block_m = names.index("BLOCK_M")

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        """What launches the kernel over at most `grid`: tiles, slices, ids."""

        def launch(*args: Any, **options: Any) -> Any:
            work = _work.get(args[self._ids].data_ptr())
            if work is None or _is_capturing():
                return self.kernel[grid](*args, **options)
            block = args[self._block_m]
            tiles = triton.cdiv(work.tokens, block)
            all_tiles = triton.cdiv(args[self._m], block)
            bounded = list(args)
            # A multiple of 16, like most: Triton compiles a variant for those that are none.
            bounded[self._m] = tiles * block
            smaller = (grid[0] // all_tiles * tiles, grid[1], min(work.ids, grid[2]))
            return self.kernel[smaller](*bounded, **options)

        return launch


@seam(
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.__init__",
    "self max_num_batched_tokens max_batches device kwargs",
)
def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Put the kernels of this process behind bounded launches, once."""
    original(self, *args, **kwargs)
    for module, name in KERNELS:
        kernel = getattr(module, name)
        if not isinstance(kernel, BoundedKernel):
            setattr(module, name, BoundedKernel(kernel))


@seam(
    "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU.update_metadata",
    "self mapping lora_index_to_id max_loras vocab_size kwargs",
)
def update_metadata(
    original: Callable[..., None], self: Any, mapping: Any, *args: Any, **kwargs: Any
) -> None:
    """Note the work of the step that comes."""
    original(self, mapping, *args, **kwargs)
    address = self.token_mapping_meta.active_lora_ids.data_ptr()
    _work.pop(address, None)
    work = work_of(mapping.index_mapping)
    if work is not None:
        _work[address] = work


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured: it is replayed for steps with other work."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
