"""Octavo's layers in the places of transformers' ones, and what holds the tensors of all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.linear import Projection
from octavo.nn.quant.base import Scheme
from octavo.nn.quant.none import Unquantized
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, owned, plain, tensor_bytes


class Multiplying(nn.Module):
    """Takes the place of an `nn.Linear`.

    Attributes:
        layer: multiplies.
    """

    def __init__(self, layer: Projection, *, wide: bool) -> None:
        """
        Args:
            wide: return float32 if that costs little, for logits.
        """
        super().__init__()
        self.layer = layer
        self._wide = wide

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ W^T + b: [..., in] to [..., out]."""
        rows = x.reshape(-1, x.shape[-1])  # Octavo's products are fastest for matrices
        y = self.layer.wide(rows) if self._wide else self.layer(rows)
        return y.view(*x.shape[:-1], y.shape[-1])


@dataclass(slots=True)
class Place:
    """A tensor of the modules: its name in the checkpoint, and all modules and attributes that share it.

    Attributes:
        tensor: the one that was made with the module; on the meta device, or with initial values.
        stored: whether checkpoints have it; other tensors are computed by the module.
    """

    name: str
    tensor: Tensor
    stored: bool
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    def set(self, tensor: Tensor) -> None:
        """Put a tensor into all of the places."""
        parameter = isinstance(self.tensor, nn.Parameter)
        for module, attribute in self.owners:
            if parameter:
                module._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
            else:
                module._buffers[attribute] = tensor


class Tensors(WeightLayer):
    """Holds the tensors of one of transformers' modules, such as a norm or an embedding, in which they are used."""

    def __init__(self, path: str, device: torch.device, places: Sequence[Place], dtypes: Sequence[torch.dtype]) -> None:
        super().__init__(path, device)
        self._places = list(places)
        self._dtypes = list(dtypes)
        self._held = SimpleNamespace()

    @property
    def holders(self) -> tuple[object, ...]:
        return (self._held,)

    def wanted(self) -> list[Wanted]:
        return [
            # A buffer has its initial value if a checkpoint lacks it.
            Wanted(place.name, TensorSpec(tuple(place.tensor.shape), dtype), optional=not place.tensor.is_meta)
            if not isinstance(place.tensor, nn.Parameter)
            else Wanted(place.name, TensorSpec(tuple(place.tensor.shape), dtype))
            for place, dtype in zip(self._places, self._dtypes, strict=True)
        ]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        for i, (place, tensor) in enumerate(zip(self._places, tensors, strict=True)):
            given = place.tensor.to(self.device, self._dtypes[i]) if tensor is None else plain(tensor)
            setattr(self._held, f"tensor_{i}", owned(given))
        self.replaced()

    def replaced(self) -> None:
        for i, place in enumerate(self._places):
            place.set(getattr(self._held, f"tensor_{i}"))

    def tensor_of(self, name: str) -> Tensor:
        """Return a placed tensor by its name."""
        i = next(i for i, place in enumerate(self._places) if place.name == name)
        tensor: Tensor = getattr(self._held, f"tensor_{i}")
        return tensor

    @property
    def nbytes(self) -> int:
        return tensor_bytes(*vars(self._held).values())


class SharedHead(Projection):
    """An output head that multiplies with the embedding table, which another layer holds."""

    scheme: Unquantized

    def __init__(self, path: str, device: torch.device, scheme: Scheme, source: Tensors, table: str) -> None:
        """
        Args:
            table: name of the table among the tensors of `source`.
        """
        super().__init__(path, device, scheme)
        self.superseded = (f"{path}.weight",)
        self._source = [source]  # in a list, so that it is not a submodule
        self._table = table

    @property
    def source(self) -> Tensors:
        return self._source[0]

    def wanted(self) -> list[Wanted]:
        return []

    def place(self, tensors: Sequence[Stored | None]) -> None:
        """Share the table, which must be placed."""
        self.scheme.share(self.source.tensor_of(self._table))


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """Return (attribute, tensor, whether checkpoints have it) of a module's own tensors, without its children's."""
    own: list[tuple[str, Tensor, bool]] = [
        (name, tensor, True) for name, tensor in module._parameters.items() if tensor is not None
    ]
    temporary: set[str] = getattr(module, "_non_persistent_buffers_set", set())
    kept: dict[str, Any] = module._buffers
    return own + [(name, tensor, name not in temporary) for name, tensor in kept.items() if tensor is not None]
