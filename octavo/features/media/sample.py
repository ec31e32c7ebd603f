"""An item to encode before any request has one."""

from __future__ import annotations

import numpy as np

from octavo.features.media.processors.base import Item, Processor, Run

_EDGES = 448, 336
_RATE = 16_000
"""Samples of a second."""


def sample_item(processor: Processor, modality: str) -> Item:
    """Return the first item of a grey picture, or of a second of silence."""
    if modality == "audio":
        pieces = processor.pieces(np.zeros(_RATE, dtype=np.float32), coarse=False)
    else:
        from PIL import Image  # imported here: only images need it

        pieces = processor.pieces(Image.new("RGB", _EDGES, (127, 127, 127)), coarse=False)
    return next(piece.item for piece in pieces if isinstance(piece, Run))
