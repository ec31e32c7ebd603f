"""Parameters of feed-forwards. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.nn.experts_spec import ClampedGate, ExpertsForm, RoutingSpec


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A feed-forward: down(act(gate(x)) * up(x)) if gated, else down(act(up(x))).

    Attributes:
        size: outputs of `up`.
        activation: a name of `nn/ops/activation.py`; "xielu" only without gates.
        curve: the parameters of xielu that the configuration states (`nn/xielu.py`); empty if they are tensors.
    """

    size: int
    activation: str = "silu"
    gated: bool = True
    curve: tuple[float, ...] = ()

    @property
    def lacking(self) -> str | None:
        """What the CPU's native program lacks for this feed-forward; None if its module has an `emit`."""
        return None

    @property
    def width(self) -> int:
        """Values of a token in front of the last product."""
        return self.size


@dataclass(frozen=True, slots=True)
class SharedSpec:
    """A dense feed-forward that all tokens use beside their experts.

    Attributes:
        name: below the mixture's place in the checkpoint.
        gate: name of a projection to one value, whose sigmoid multiplies the output; None for none.
        scale: factor of the output.
    """

    size: int
    name: str = "shared_experts"
    gate: str | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts: a router chooses some for each token, and their outputs are weighted and summed.

    Attributes:
        size: outputs of one expert's `up`.
        activation: a name of `nn/ops/activation.py`.
        gated: experts, and the shared one, have gates; as in `MlpSpec`.
        clamped: replaces the activation; None for none.
        bias: the experts' products have biases.
        shared: None for none.
    """

    num_experts: int
    size: int
    routing: RoutingSpec
    activation: str = "silu"
    gated: bool = True
    clamped: ClampedGate | None = None
    bias: bool = False
    shared: SharedSpec | None = None

    @property
    def width(self) -> int:
        """Values of a token in front of the last products."""
        return self.routing.top_k * self.size + (self.shared.size if self.shared else 0)

    def form(self, hidden_size: int) -> ExpertsForm:
        """Return the experts' products, undivided."""
        return ExpertsForm(
            num_experts=self.num_experts,
            hidden_size=hidden_size,
            size=self.size,
            activation=self.activation,
            gated=self.gated,
            clamped=self.clamped,
            bias=self.bias,
            on_inputs=self.routing.on_inputs,
        )

    @property
    def lacking(self) -> str | None:
        """What the CPU's native program lacks for this feed-forward; None if its module has an `emit`."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSpec:
    """A dense feed-forward and a mixture of experts of the same input, each with norms of its own; their sum (Gemma 4).

    The dense one reads the layer's norm of the input. The router reads an RMSNorm of it, whose weights are divided by
    the square root of the hidden size.

    Attributes:
        eps: of all these RMSNorms.
    """

    mlp: MlpSpec
    experts: ExpertsSpec
    eps: float

    @property
    def activation(self) -> str:
        return self.mlp.activation

    @property
    def width(self) -> int:
        """Values of a token in front of the last products."""
        return self.mlp.width + self.experts.width

    @property
    def lacking(self) -> str | None:
        """What the CPU's native program lacks for this feed-forward; None if its module has an `emit`."""
        return None


FeedForwardSpec = MlpSpec | ExpertsSpec | BesideSpec
"""Parameters of a layer's feed-forward; `feed_forwards/table.py` has the module of each kind."""


def experts_in(mlp: object) -> ExpertsSpec | None:
    """Return the mixture of experts of a feed-forward with these parameters; None if it has none."""
    if isinstance(mlp, BesideSpec):
        return mlp.experts
    return mlp if isinstance(mlp, ExpertsSpec) else None
