"""`BridgedSpec`: what Octavo must know of a model of transformers' modules."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.features.bridge.trial import BridgedAttention
from octavo.nn.attention.base import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgedSpec:
    """A `ModelSpec` from a trial of the module.

    Attributes:
        layers: its attention layers, in order.
        recordable: no data passes between host and device in a step.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    tied: bool
    recordable: bool
    layers: tuple[BridgedAttention, ...]
    has_windows: bool = True

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def lacking(self) -> str:
        return "modules of transformers"

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.attention(i).window for i in range(self.num_layers))

    def attention(self, index: int) -> AttentionSpec:
        """Return a layer's attention."""
        spec = self.layers[index].spec
        return spec if self.has_windows else replace(spec, window=None)

    def within(self, max_length: int | None) -> BridgedSpec:
        """Return the spec itself: no supported model computes otherwise for short sequences."""
        return self

    def without_windows(self) -> BridgedSpec:
        """Return the spec with full attention in all layers, for sequences shorter than any window."""
        narrowest = min((window for window in self.windows if window is not None), default=None)
        if narrowest is None:
            return self
        return replace(self, has_windows=False, max_position=min(self.max_position, narrowest))
