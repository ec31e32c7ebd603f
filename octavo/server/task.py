"""Cancellation of tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel `task` and wait for its end, so that it has released its resources."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
