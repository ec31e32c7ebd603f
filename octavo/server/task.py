"""Waiting for events, and cancellation of tasks."""

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


async def wait_any(*events: asyncio.Event, timeout: float | None = None) -> None:
    """Wait for the first of these events, or until `timeout` seconds have passed."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
