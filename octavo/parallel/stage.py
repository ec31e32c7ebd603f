"""`Stage`: one rank's view of a pipeline, whose stages compute consecutive layers of one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class StageLink(Protocol):
    """Passes hidden states to the next stage. Tensors arrive in the order in which they were sent."""

    def send(self, x: Tensor) -> None:
        """Send x to the next stage without waiting for it. x must not be changed afterwards."""
        ...

    def receive(self, x: Tensor) -> None:
        """Fill x with what the stage before sent: a tensor of the same shape and dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline. The only stage of a model passes nothing on.

    Attributes:
        number, count: this stage's number, and the number of stages.
        link: to the neighbouring stages; None if only shapes are needed.
    """

    number: int = 0
    count: int = 1
    link: StageLink | None = None

    @property
    def first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it computes logits and samples."""
        return self.number == self.count - 1

    @property
    def joined(self) -> StageLink:
        assert self.link is not None, "this stage is for shapes only"
        return self.link


WHOLE = Stage()
