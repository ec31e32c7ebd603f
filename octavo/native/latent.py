"""Operations of latent attention in a native program (`src/latent.cpp`)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p

from octavo.native.bindings import Dtype, OpKind
from octavo.native.builder import ProgramBuilder


class Latent(ctypes.Structure):
    """`OctavoLatent`: a layer's parameters. All widths are multiples of 16.

    Attributes:
        cos_sin: address of float32 [positions, rope_dim]; 0 if queries are rotated already.
        norm: address of float32 [rank], the weights of the latents' RMS norm, with epsilon `eps`.
        expansion: address of [heads, nope_dim + value_dim, rank], in the dtype of the cache.
        cache: address of [cells, rank + rope_dim].
        scale: multiplies q·k before the softmax.
        sharpening, interval, first: of the queries' factors, as the temperature of `ProgramBuilder.rope`; a sharpening
            of 0 for none.
        begin: of the latents in the rows that `store` reads.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("cos_sin", "norm", "expansion", "cache")),
        *((name, c_float) for name in ("eps", "scale", "sharpening")),
        *((name, c_int32) for name in ("heads", "rank", "rope_dim", "nope_dim", "value_dim")),
        *((name, c_int32) for name in ("begin", "interval", "first")),
    )

    @property
    def width(self) -> int:
        """Channels of a query that attends to latents."""
        width: int = self.rank + self.rope_dim
        return width


def store(b: ProgramBuilder, layer: Latent, source: int, dtype: Dtype, group: int) -> None:
    """Add an operation: normalize and rotate the latents in float32 rows, and write them to the cache.

    Args:
        dtype: of the cache, FLOAT or BFLOAT, also below.
        group: the cache group whose slots give the cells.
    """
    _add(b, OpKind.LATENT_STORE, layer, source, source, dtype, group)


def attend(b: ProgramBuilder, layer: Latent, queries: int, output: int, dtype: Dtype, group: int) -> None:
    """Add the operations of causal attention over each row's latents, in the absorbed form.

    Args:
        queries: buffer of float32 [T, heads, nope_dim + rope_dim].
        output: buffer for [T, heads, value_dim] in `dtype`.
    """
    absorbed = b.scratch("absorbed", layer.heads * layer.width * 4)
    mixed = b.scratch("mixed latents", layer.heads * layer.rank * 4)
    _add(b, OpKind.ABSORB, layer, queries, absorbed, dtype, group)
    _add(b, OpKind.LATENT_ATTEND, layer, absorbed, mixed, dtype, group)
    _add(b, OpKind.LATENT_MERGE, layer, absorbed, mixed, dtype, group)
    _add(b, OpKind.LATENT_EXPAND, layer, mixed, output, dtype, group)


def _add(b: ProgramBuilder, kind: OpKind, layer: Latent, source: int, output: int, dtype: Dtype, group: int) -> None:
    b.kept.append(layer)
    b.add(
        kind,
        dtype,
        source,
        output,
        heads=layer.heads,
        head_dim=layer.rank,  # of the results of parts
        group=group,
        details=ctypes.addressof(layer),
    )
