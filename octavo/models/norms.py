"""Norms of a decoder, from its spec."""

from __future__ import annotations

from octavo.models.spec import NormSpec
from octavo.nn.build import Build
from octavo.nn.norm import NoNorm, Norm


def make_norm(b: Build, name: str | None, size: int, spec: NormSpec) -> Norm:
    """Make the norm with this name; one that changes nothing if there is none."""
    if name is None:
        return NoNorm(b.path, b.device, b.dtype, size)
    if spec.kind == "rms":
        return b.norm(name, size, spec.eps, offset=spec.offset, scaled=spec.scaled)
    return b.layer_norm(name, size, spec.eps, bias=spec.bias, scaled=spec.scaled, offset=spec.offset)
