"""Latent attention on CPU in Octavo's C++ kernels, in the absorbed form.

A native program (see models/native.py) contains these kernels; here attention runs by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.native import latent
from octavo.native.builder import ProgramBuilder
from octavo.native.latent import Latent
from octavo.native.program import Pool, Program
from octavo.nn.attention.native import NativeBackend
from octavo.nn.latent.base import LatentNorm, LatentSpec, RowLatents
from octavo.nn.quant.packed import DTYPES
from octavo.nn.quant.panels import PANEL
from octavo.nn.step import StepInput


class NativeLatents(RowLatents, NativeBackend):
    """Copies nothing. Results are bitwise independent of the rest of the batch and of a prompt's chunks."""

    name = "native"
    follows_table_rows = False

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def attend(
        self, q: Tensor, latents: Tensor, expansion: Tensor, cache: Tensor, step: StepInput, spec: LatentSpec
    ) -> Tensor:
        queries = q.float().contiguous()
        out = torch.empty(*q.shape[:2], spec.value_dim, dtype=q.dtype)
        b = ProgramBuilder.make(spec.num_heads * spec.query_dim * 4, out[0].numel() * out.element_size())
        layer = _parameters(spec, expansion, cache)
        latent.attend(b, layer, 0, 1, DTYPES[cache.dtype], 0)
        step.attn.external[:2] = (queries.data_ptr(), out.data_ptr())
        Program(self.pool, b).run(0, len(b.ops), step.attn)
        return out

    def emit(
        self,
        b: ProgramBuilder,
        queries: int,
        latents: tuple[int, int],
        output: int,
        norm: LatentNorm,
        cos_sin: Tensor,
        expansion: Tensor,
        cache: Tensor,
        group: int,
        spec: LatentSpec,
        temperature: tuple[float, int, int] | None = None,
    ) -> None:
        """Add one layer's operations to a program: norm and rotation, the write to the cache, attention.

        Args:
            queries: buffer of float32 [T, num_heads, query_dim], not rotated.
            latents: buffer of float32 rows, and where in them the latents begin.
            norm: float32 weight and epsilon.
            cos_sin: [max_position, rope_dim] float32.
            group: the layer's cache group.
            temperature: as in `ProgramBuilder.rope`.
        """
        layer = _parameters(spec, expansion, cache)
        layer.norm, layer.eps, layer.cos_sin = norm[0].data_ptr(), norm[1], cos_sin.data_ptr()
        layer.sharpening, layer.interval, layer.first = temperature or (0.0, 1, 0)
        source, layer.begin = latents
        dtype = DTYPES[cache.dtype]
        latent.store(b, layer, source, dtype, group)
        b.run_beside()
        latent.attend(b, layer, queries, output, dtype, group)


def _parameters(spec: LatentSpec, expansion: Tensor, cache: Tensor) -> Latent:
    return Latent(
        expansion=expansion.data_ptr(),
        cache=cache.data_ptr(),
        scale=spec.scale,
        heads=spec.num_heads,
        rank=spec.rank,
        rope_dim=spec.rope_dim,
        nope_dim=spec.nope_dim,
        value_dim=spec.value_dim,
    )


def reason_against(device: torch.device, dtype: torch.dtype, spec: LatentSpec) -> str | None:
    """Return the reason why the kernels can't serve this, apart from a missing compiler; None if they can."""
    if device.type != "cpu":
        return f"runs on cpu, not on {device.type}"
    if dtype not in DTYPES:
        return f"computes in {', '.join(map(str, DTYPES))}, not in {dtype}"
    widths = (spec.rank, spec.rope_dim, spec.nope_dim, spec.value_dim)
    if any(width % PANEL for width in widths):
        return f"needs widths that are multiples of {PANEL}, not {', '.join(map(str, widths))}"
    return None
