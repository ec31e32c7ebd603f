"""Which attention backend serves a device, dtype and layer: the first that can, in order of speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.core.errors import ConfigError
from octavo.nn.attention.base import AttentionBackend, AttentionSpec, BackendFactory
from octavo.nn.attention.cpu import DTYPES, TorchAttention
from octavo.nn.attention.reference import ReferenceAttention


@dataclass(frozen=True, slots=True)
class Factory:
    """A `BackendFactory` made of two functions."""

    name: str
    reason_against: Callable[[torch.device, torch.dtype, AttentionSpec], str | None]
    make_backend: Callable[[], AttentionBackend]

    def supports(self, device: torch.device, dtype: torch.dtype, spec: AttentionSpec) -> str | None:
        return self.reason_against(device, dtype, spec)

    def make(self) -> AttentionBackend:
        return self.make_backend()


def _torch_reason(device: torch.device, dtype: torch.dtype, spec: AttentionSpec) -> str | None:
    if device.type != "cpu":
        return f"runs on cpu, not on {device.type}"
    if dtype not in DTYPES:
        return f"computes in {', '.join(map(str, DTYPES))}, not in {dtype}"
    return None


def _reference_reason(device: torch.device, dtype: torch.dtype, spec: AttentionSpec) -> str | None:
    return None if dtype.is_floating_point else f"needs a floating-point dtype, not {dtype}"


BACKENDS: tuple[BackendFactory, ...] = (
    Factory("torch", _torch_reason, TorchAttention),
    Factory("reference", _reference_reason, ReferenceAttention),
)


def select(name: str | None, device: torch.device, dtype: torch.dtype, spec: AttentionSpec) -> AttentionBackend:
    """The backend called `name`, or the fastest one that supports the rest.

    Raises:
        ConfigError: `name` is unknown, or doesn't support this device, dtype or layer; lists what does and what not.
    """
    reasons = {factory.name: factory.supports(device, dtype, spec) for factory in BACKENDS}
    for factory in BACKENDS:
        if name in (None, factory.name) and reasons[factory.name] is None:
            return factory.make()
    listed = "; ".join(f"{n}: {'usable' if why is None else why}" for n, why in reasons.items())
    if name is None:
        problem = f"No attention backend supports {device} with {dtype}."
    elif name in reasons:
        problem = f"The attention backend {name!r} can't be used here; leave the choice out to get one that can."
    else:
        problem = f"There is no attention backend {name!r}; leave the choice out or take one of these."
    raise ConfigError(f"{problem} {listed}.")
