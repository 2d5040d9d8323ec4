"""Batches of few tokens, by adapters of two ranks. Tests only."""

from __future__ import annotations

from serve.bench.sgmv.batches import SgmvBatch

RANKS = (16, 16, 4)
FEW = SgmvBatch("few", ((2, 3), (0, 3), (1, 4)), RANKS)
ONE = SgmvBatch("one", ((1, 30),), RANKS)
