"""What an ablation switches off is off: in a process of its own, because the others need theirs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from guard.layout import ROOT

pytestmark = pytest.mark.slow

# Raises where a seam stays
SWITCH_OFF = """
from serve.bench.ablation.ablations import ABLATIONS
from serve.bench.ablation.engine import switch_off
for of_traffic in ABLATIONS.values():
    for ablation in of_traffic:
        switch_off(ablation.seams_off)
"""


def test_every_ablation_s_seams_can_be_switched_off() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWITCH_OFF], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
