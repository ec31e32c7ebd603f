"""`Mixer`: the interface of a layer's first part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from octavo.models.mixers.spec import MixerSpec, Temperature
from octavo.native.builder import ProgramBuilder
from octavo.nn.build import Build
from octavo.nn.linear import Projection
from octavo.nn.norm import Norm
from octavo.nn.rounded import Activations
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream

Spec = TypeVar("Spec", bound=MixerSpec)


def divided(b: Build, whole: Spec) -> tuple[Build, Spec]:
    """Return the settings and parameters of this rank's share of a mixer; those of the whole, which every rank then
    computes, if its heads or channels can't be divided."""
    own = whole.of_rank(b.mesh.size)
    return (b.undivided(), whole) if own is None else (b, own)


def query_factors(positions: Tensor, temperature: Temperature) -> Tensor:
    """Return the factors of queries at these positions, float32."""
    steps = torch.floor((positions.float() + temperature.first) / temperature.interval)
    return torch.log1p(steps) * temperature.scale + 1.0


class Mixer(nn.Module, ABC):
    """Passes information between the tokens of a sequence: attention, a state space, a convolution.

    What it keeps between steps is in submodules with the interface of `CachedLayer` (`PagedAttention`, `StateCache`),
    which the model lists in `cached_layers`. A row's result must not depend on other rows, nor on how its tokens are
    divided into steps beyond rounding.

    Attributes:
        out: the output projection. The layer applies it, since it can add its result to the stream itself.
    """

    out: Projection

    if TYPE_CHECKING:

        def __call__(self, stream: Stream, norm: Norm, step: StepInput, /) -> Tensor: ...

    @abstractmethod
    def forward(self, stream: Stream, norm: Norm, step: StepInput) -> Tensor:
        """Return what `out` multiplies, [T, inputs of `out`], for norm(stream)."""

    def activations(self, stream: Stream, norm: Norm, step: StepInput) -> Activations:
        """Return `forward` of all tokens, rounded if `out` takes it so and its last operation can round."""
        return self(stream, norm, step)

    def emit(self, b: ProgramBuilder, norm: Norm, dtype: torch.dtype, output: int) -> None:
        """Add `forward`, from the residual stream to the buffer `output`, to a native program.

        Only for mixers with `MixerSpec.lacking` None.
        """
        raise AssertionError(f"the kernels lack {type(self).__name__}")
