"""`EmbedsWorker`: the worker half. It puts a step's embeddings among those of the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.embeds import FloatType
from octavo.device.transfer import upload
from octavo.features.prompt_embeds.engine import Piece
from octavo.worker.hooks import WorkerHook

_NUMPY: dict[FloatType, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<i2"}


class EmbedsWorker(WorkerHook):
    """Keeps nothing: all is in the payload. Embeddings are rounded to the dtype of the model's own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def embed(self, x: Tensor, payload: Sequence[Piece]) -> None:
        for piece in payload:
            rows = np.frombuffer(piece.data, dtype=_NUMPY[piece.dtype]).reshape(-1, x.shape[1])
            given = upload(rows.copy(), x.device)  # what came over the wire is not to be written, and torch warns of it
            x[piece.start : piece.start + len(rows)] = (
                given.view(torch.bfloat16) if piece.dtype == "bfloat16" else given
            )
