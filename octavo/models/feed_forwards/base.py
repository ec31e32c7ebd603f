"""The interface between a decoder's layers and their feed-forwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from octavo.native.builder import ProgramBuilder
from octavo.nn.norm import Norm
from octavo.nn.stream import Stream, StreamOutput


class FeedForward(nn.Module, ABC):
    """The part of a layer behind its mixer. The layer adds out(forward(stream, norm)) to the residual stream.

    Attributes:
        out: the last operation, which can add its result to the stream itself.
    """

    out: StreamOutput[Any]

    if TYPE_CHECKING:

        def __call__(self, stream: Stream, norm: Norm, /) -> Any: ...

    @abstractmethod
    def forward(self, stream: Stream, norm: Norm) -> Any:
        """Return the argument of `out` for norm(stream): a tensor [T, ...], or what else `out` takes."""

    def join(self, dtype: torch.dtype) -> None:
        """Take part in what other ranks compute with this one, in a step in which this rank has no rows.

        Args:
            dtype: of the layer's norm.
        """

    def emit(self, b: ProgramBuilder, norm: Norm, after: Norm | None = None, scale: float = 1.0) -> None:
        """Add scale * after(out(forward(stream, norm))) to the stream, in a native program; without `after`,
        scale * out(...). Only for feed-forwards that `models/native.py` does not refuse."""
        raise AssertionError(f"the kernels lack {type(self).__name__}")
