"""`EmbedsWorker`: the worker half. It writes a step's embeddings over those of the placeholders."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.device.transfer import upload
from octavo.features import FeatureContext
from octavo.features.prompt_embeds.payload import NAME, Pieces
from octavo.features.prompt_embeds.settings import PromptEmbedsSettings
from octavo.features.prompt_embeds.span import FloatType
from octavo.worker.hooks import WorkerHook

_NUMPY: dict[FloatType, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<i2"}


class EmbedsWorker(WorkerHook):
    """Stateless: everything is in the payload. Embeddings are rounded to the model's dtype."""

    def __init__(self, name: str) -> None:
        self.name = name

    def embed(self, x: Tensor, payload: Pieces) -> None:
        for piece in payload.pieces:
            rows = np.frombuffer(piece.data, dtype=_NUMPY[piece.dtype]).reshape(-1, x.shape[1])
            given = upload(rows.copy(), x.device)  # a copy, since torch warns about read-only memory
            x[piece.start : piece.start + len(rows)] = (
                given.view(torch.bfloat16) if piece.dtype == "bfloat16" else given
            )


def build_worker(context: FeatureContext) -> EmbedsWorker | None:
    """Return None unless the settings enable it."""
    return EmbedsWorker(NAME) if context.settings_of(PromptEmbedsSettings).enable_prompt_embeds else None
