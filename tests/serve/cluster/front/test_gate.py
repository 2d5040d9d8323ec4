from __future__ import annotations

import asyncio

import pytest

from serve.cluster.front.gate import Gate


def test_whoever_comes_while_it_is_closed_waits_and_those_inside_end_first() -> None:
    order: list[str] = []

    async def check(gate: Gate, name: str, seconds: float) -> None:
        async with gate.passing(5):
            order.append(f"{name} in")
            await asyncio.sleep(seconds)
            order.append(f"{name} out")

    async def change(gate: Gate) -> None:
        async with gate.closed(5):
            order.append("changed")
            await asyncio.sleep(0.05)

    async def run() -> None:
        gate = Gate()
        first = asyncio.create_task(check(gate, "first", 0.1))
        await asyncio.sleep(0.02)
        changing = asyncio.create_task(change(gate))
        await asyncio.sleep(0.02)
        await asyncio.gather(first, changing, check(gate, "second", 0.0))

    asyncio.run(run())
    assert order == ["first in", "first out", "changed", "second in", "second out"]


def test_nobody_waits_too_long_and_a_change_that_gives_up_opens_the_gate_again() -> None:
    async def run() -> None:
        gate = Gate()
        async with gate.passing(5):
            with pytest.raises(TimeoutError):
                async with gate.closed(0.05):
                    pytest.fail("somebody is inside")
            async with gate.passing(0.05):
                pass
        async with gate.closed(5):
            with pytest.raises(TimeoutError):
                async with gate.passing(0.05):
                    pytest.fail("it is closed")
        async with gate.closed(0.05):  # whoever gave up is not inside
            pass

    asyncio.run(run())
