"""`Relay`: hidden states on their way through the stages of a pipeline."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.models.decoder import CausalLM
from octavo.models.model import Model
from octavo.models.native import NativeDecoder
from octavo.parallel.stage import WHOLE, Stage


class Relay:
    """Receives a step's hidden states from the stage before, and sends those of this stage to the next one.

    Attributes:
        first, last: whether this stage embeds tokens, and whether it samples them.
        entry: [max_tokens, hidden_size], what was received last, at a fixed address; None in the first stage.
    """

    def __init__(
        self, stage: Stage, max_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.first, self.last = stage.first, stage.last
        self._stage = stage
        self.entry: Tensor | None = None
        if not stage.first:
            self.entry = torch.zeros(max_tokens, hidden_size, dtype=dtype, device=device)

    def receive(self, tokens: int) -> None:
        """Fill the first rows of `entry`."""
        if self.entry is not None:
            self._stage.joined.receive(self.entry[:tokens])

    def send(self, hidden: Tensor) -> None:
        """Send hidden states [T, hidden_size], which must not be changed afterwards. The last stage sends nothing."""
        if not self.last:
            self._stage.joined.send(hidden)


NO_RELAY = Relay(WHOLE, 0, 0, torch.float32, torch.device("cpu"))
"""Of a model that is not divided into stages."""


def relay_of(model: Model, stage: Stage, max_tokens: int) -> Relay:
    """Return what passes on the hidden states of steps of up to `max_tokens`, and bind the model to what comes in."""
    layers = model.source if isinstance(model, NativeDecoder) else model
    if not isinstance(layers, CausalLM) or stage.count == 1:
        return NO_RELAY
    relay = Relay(stage, max_tokens, layers.spec.hidden_size, layers.residual_dtype, layers.device)
    layers.entry = relay.entry
    return relay
