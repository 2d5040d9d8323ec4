"""A device that is not here: the time of a step computed from its operations and bytes, never
measured.

A step takes the longer of the times for computing and for reading memory. The host's time for each
step and rule comes on top, as far as the device does not hide it. Knows nothing of queues.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict, Field

from guard.files.yaml_file import Strict, load
from guard.home import HOME, own_or_shipped
from serve.plan.device.architecture import DecoderShape
from serve.plan.device.step_cost import StepWork

DEVICES = HOME / "recipes" / "devices"
TERA, GIGA = 1e12, 1e9


class Device(Strict):
    """The content of `recipes/devices/<name>.yaml`. Each `source` says where its figures are from.

    `compute_share`, `memory_share`: the assumed shares of the peaks that a step reaches.
    `reads_shared_once`: whether rules read their conversation's keys and values once a step, as our
    CPU kernels do, or once a rule. `host_…`: the time that Python takes beside the model.
    `host_to_device_gb_s`, `disk_gb_s`: how fast an adapter is copied, and read from disk.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    name: str
    source: str
    peak_tflops: float = Field(gt=0)
    memory_gb_s: float = Field(gt=0)
    memory_gib: float = Field(gt=0)
    workspace_gib: float = Field(default=3.0, ge=0)
    compute_share: float = Field(default=0.5, gt=0, le=1)
    memory_share: float = Field(default=0.7, gt=0, le=1)
    reads_shared_once: bool = False
    host_step_ms: float = Field(ge=0)
    host_rule_ms: float = Field(ge=0)
    host_check_ms: float = Field(default=0.4, ge=0)
    host_token_us: float = Field(default=2.0, ge=0)
    host_source: str
    host_to_device_gb_s: float = Field(gt=0)
    disk_gb_s: float = Field(gt=0)
    price_an_hour: float = Field(gt=0)
    price_source: str


def load_device(name: str, folder: Path = DEVICES) -> Device:
    """The device of this name. Raises a GuardError that names the known devices."""
    return load(own_or_shipped(folder / f"{name}.yaml"), Device)


@dataclass(frozen=True)
class ComputedCost:
    """A StepCost computed from operations and bytes.

    `adapter_weights`: the count of one adapter's weights.
    """

    device: Device
    shape: DecoderShape
    width: int  # bytes of a number
    adapter_weights: int
    wake_ms: float = 0.0

    def step_ms(self, work: StepWork) -> float:
        """The time of steps of this work, with the copies and loads of their adapters."""
        device_s = max(self.compute_s(work), self.memory_s(work))
        host_ms = work.steps * self.device.host_step_ms + work.sequences * self.device.host_rule_ms
        return 1000 * (device_s + self.swap_s(work)) + host_ms

    def compute_s(self, work: StepWork) -> float:
        """The time of all products, at the assumed share of the peak."""
        flops = work.tokens * self.shape.token_flops() + work.pairs * self.shape.pair_flops()
        flops += work.adapted * 2.0 * self.adapter_weights
        return flops / (self.device.peak_tflops * TERA * self.device.compute_share)

    def memory_s(self, work: StepWork) -> float:
        """The time to read the base's weights, each rule's adapter, and earlier keys and values."""
        numbers = work.steps * self.shape.weights + work.sequences * self.adapter_weights
        if not self.device.reads_shared_once:
            numbers += work.reads * self.shape.key_value_width
        bandwidth = self.device.memory_gb_s * GIGA * self.device.memory_share
        return numbers * self.width / bandwidth

    def swap_s(self, work: StepWork) -> float:
        """The time of copies into slots and reads from disk; none of it is hidden."""
        size = self.adapter_weights * self.width
        copied = work.swap_ins * size / (self.device.host_to_device_gb_s * GIGA)
        return copied + work.loads * size / (self.device.disk_gb_s * GIGA)

    def submit_ms(self, tokens: int, rules: int) -> float:
        """The time to put a check into the engine, without its rules: see `host_rule_ms`."""
        return self.device.host_check_ms + self.device.host_token_us * tokens / 1000
