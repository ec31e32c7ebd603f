"""A model's way to make vectors, as an engine core tells it to front ends."""

from __future__ import annotations

from typing import Any

import msgspec


def told(pooler: Any) -> dict[str, msgspec.Raw]:
    """`ModelInfo.feature_info` with this pooler; {} for None."""
    return {} if pooler is None else {"pooling": msgspec.Raw(msgspec.msgpack.encode(pooler))}
