"""Parameters of feed-forwards. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A feed-forward: down(act(gate(x)) * up(x)) if gated, else down(act(up(x))).

    Attributes:
        size: outputs of `up`.
        activation: a name of `nn/ops/activation.py`.
    """

    size: int
    activation: str = "silu"
    gated: bool = True

    @property
    def lacking(self) -> str | None:
        """What the CPU's native program lacks for this feed-forward; None if its module has an `emit`."""
        return None

    @property
    def width(self) -> int:
        """Values of a token in front of the last product."""
        return self.size


FeedForwardSpec = MlpSpec
"""Parameters of a layer's feed-forward; `feed_forwards/table.py` has the module of each kind."""
