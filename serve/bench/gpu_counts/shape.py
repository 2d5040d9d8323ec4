"""The adapted layers of Qwen3-4B as vLLM packs them, from the model's published config.json.

Knows nothing of engines.
"""

from __future__ import annotations

from typing import NamedTuple

LAYERS = 36  # in the decoder


class PackedLayer(NamedTuple):
    """Projections that vLLM computes as one: the width of their input, and of each output."""

    reads: int
    writes: tuple[int, ...]


PACKED_LAYERS = (
    PackedLayer(2560, (4096, 1024, 1024)),  # q, k, v
    PackedLayer(4096, (2560,)),  # o
    PackedLayer(2560, (9728, 9728)),  # gate, up
    PackedLayer(9728, (2560,)),  # down
)
