"""Lets checks pass, and holds new ones for the moment in which nothing may be under way.

For one event loop. Knows nothing of what passes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Gate:
    """Open for any number at once, or closed for one alone, who waits until all are through."""

    def __init__(self) -> None:
        self._inside = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._closing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def passing(self, within_s: float) -> AsyncIterator[None]:
        """Go through. Raises TimeoutError if the gate is closed for longer than `within_s`."""
        if not self._is_open.is_set():
            async with asyncio.timeout(within_s):
                await self._is_open.wait()
        self._inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._is_empty.set()

    @contextlib.asynccontextmanager
    async def closed(self, within_s: float) -> AsyncIterator[None]:
        """Hold whoever comes, once all who are inside are through.

        Raises TimeoutError if that takes longer than `within_s`; the gate is then open as before.
        """
        async with self._closing:
            self._is_open.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._is_empty.wait()
                yield
            finally:
                self._is_open.set()
