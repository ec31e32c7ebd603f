"""Several streams read as one: nothing lost, nothing left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.server.merge import merge


class Source:
    """Yields its items, fails if told to, and knows whether it was closed."""

    def __init__(self, items: list[int], error: Exception | None = None) -> None:
        self.items = items
        self.error = error
        self.closed = False

    async def read(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                await asyncio.sleep(0)
                yield item
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


@given(st.lists(st.lists(st.integers(), max_size=40), min_size=1, max_size=5))
def test_each_source_comes_whole_and_in_order(lists: list[list[int]]) -> None:
    async def scenario() -> None:
        sources = [Source(items) for items in lists]
        got: list[list[int]] = [[] for _ in lists]
        async for number, item in merge([source.read() for source in sources]):
            got[number].append(item)
        assert got == lists
        assert all(source.closed for source in sources)

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [1, 3])
def test_a_failure_closes_all(count: int) -> None:
    async def scenario() -> None:
        sources = [Source([1], ValueError("broken")), *(Source(list(range(10_000))) for _ in range(count - 1))]
        with pytest.raises(ValueError, match="broken"):
            async for _ in merge([source.read() for source in sources]):
                pass
        assert all(source.closed for source in sources)

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [1, 3])
def test_closing_closes_all(count: int) -> None:
    async def scenario() -> None:
        sources = [Source(list(range(10_000))) for _ in range(count)]
        async with aclosing(merge([source.read() for source in sources])) as merged:
            for _ in range(5 * count):
                await anext(merged)
        assert all(source.closed for source in sources)

    asyncio.run(scenario())
