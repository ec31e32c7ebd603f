"""Ending tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel `task` and see it through, so that what it held is released before we go on."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
