"""`Taps`: hidden states of chosen layers, kept for what reads them besides the next layer."""

from __future__ import annotations

import torch
from torch import Tensor


class Taps:
    """States of the residual stream of all tokens of the last step, in the batch's order.

    At fixed addresses, so that recorded steps write them, too.

    Attributes:
        places: where the stream is read, ascending: place i is the input of layer i, and the number of layers the
            output of the last one.
        last: the output of the last layer is among them, so that layer computes all tokens (`worker/compute.py`).
        states: [tokens, places, hidden_size].
    """

    def __init__(
        self,
        places: tuple[int, ...],
        num_layers: int,
        tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            num_layers: of the model.
            tokens: most tokens of a step, padding included.
        """
        self.places = places
        self.last = num_layers in places
        self.states = torch.zeros(tokens, len(places), hidden_size, dtype=dtype, device=device)

    def keep(self, place: int, stream: Tensor) -> None:
        """Keep the stream [T, hidden_size] at one of the places."""
        self.states[: len(stream), self.places.index(place)].copy_(stream)
