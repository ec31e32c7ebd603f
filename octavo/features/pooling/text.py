"""`PoolingText`: the text half. It prepares requests for vectors."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from octavo.text.hooks import TextHook

if TYPE_CHECKING:
    from octavo.features.pooling.requests import PoolingPreparer


class PoolingText(TextHook):
    """Claims no request fields: pooling has routes and methods of its own."""

    name = "pooling"

    @cached_property
    def preparer(self) -> PoolingPreparer:
        from octavo.features.pooling.requests import PoolingPreparer  # imported here: it imports front-end modules

        return PoolingPreparer(self.context.tokenizer, self.context.info)


TEXT = PoolingText
