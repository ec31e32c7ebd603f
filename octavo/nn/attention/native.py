"""Attention on CPU in Octavo's C++ kernels, as an attention backend.

A native program (see models/native.py) contains these kernels; here they run one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.native.bindings import Dtype, StepArgs
from octavo.native.builder import ProgramBuilder
from octavo.native.program import Pool, Program
from octavo.nn.attention.base import AttentionSpec, Norms
from octavo.nn.attention.kv_int8 import SCALE_BYTES
from octavo.nn.quant.packed import DTYPES
from octavo.nn.quant.panels import PANEL
from octavo.nn.step import StepInput

CACHE_DTYPES = {**DTYPES, torch.int8: Dtype.INT8}


class NativeBackend:
    """A backend in Octavo's C++ kernels, which native programs can contain.

    Attributes:
        pool: the compute threads.
    """

    pool: Pool

    def prepare(self, step: StepInput, block_size: int) -> StepArgs:
        """Return the step in the kernels' form."""
        return native_step(step, block_size)


class NativeAttention(NativeBackend):
    """Copies nothing. Results are bitwise independent of the rest of the batch and of a prompt's chunks.

    Attributes:
        pool: the compute threads.
        int8: the cache holds 8-bit integers with scales, otherwise numbers of the model's dtype.
    """

    name = "native"
    follows_table_rows = False

    def __init__(self, pool: Pool, *, int8: bool = False) -> None:
        self.pool = pool
        self.int8 = int8

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return [block, head, key or value, ...]: within a block, both are stored in panels, followed by scales."""
        return (num_blocks, spec.num_kv_heads, 2, block_size, spec.head_dim + (SCALE_BYTES if self.int8 else 0))

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        """Store keys and values with the rope kernel, without rotation."""
        _, heads, dim = k.shape
        rows = torch.cat([k, v], dim=1).to(torch.float32, memory_format=torch.contiguous_format).flatten(1)
        builder = ProgramBuilder.make(rows.shape[1] * 4, 0)
        dtype, cache_dtype = DTYPES.get(cache.dtype, Dtype.FLOAT), CACHE_DTYPES[cache.dtype]
        place = cache.data_ptr()
        builder.rope(0, 1, dtype, (0, heads, dim), 0, 0, place, block_stride=_stride(cache), cache_dtype=cache_dtype)
        self._run(builder, step, rows, None)

    def attend(
        self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        q = q.contiguous()
        out = torch.empty_like(q)
        width = q.shape[1] * q.shape[2] * q.element_size()
        builder = ProgramBuilder.make(width, width)
        builder.attend(
            0,
            1,
            DTYPES[q.dtype],
            (spec.num_heads, spec.num_kv_heads, spec.head_dim),
            cache.data_ptr(),
            spec.scale,
            block_stride=_stride(cache),
            cache_dtype=CACHE_DTYPES[cache.dtype],
            window=spec.window or 0,
            chunked=spec.chunked,
            soft_cap=spec.soft_cap or 0.0,
            slopes=_slopes(builder, spec),
            sinks=_sinks(builder, sinks),
        )
        self._run(builder, step, q, out)
        return out

    def widen(self, queries: int) -> int:
        """Do nothing: rows of any length are computed alike."""
        return queries

    def move(self, caches: Tensor, sources: Tensor, targets: Tensor) -> None:
        *_, size, width = caches.shape
        dim = width - (SCALE_BYTES if self.int8 else 0)
        word = 4 // caches.element_size()
        heads = caches.flatten(3)  # [layers, blocks, kv heads, keys, values, and their scales]
        # As attention.h has them: keys in panels of tokens, values in panels of channels with several tokens in a word.
        keys = heads[..., : size * dim].unflatten(-1, (size // PANEL, dim // word, PANEL, word))
        values = heads[..., size * dim : 2 * size * dim].unflatten(-1, (dim // PANEL, size // word, PANEL, word))
        scales = heads[..., 2 * size * dim :].unflatten(-1, (2, size, -1)) if self.int8 else None
        block, place = sources // size, sources % size
        into, at = targets // size, targets % size
        keys[:, into, :, at // PANEL, :, at % PANEL] = keys[:, block, :, place // PANEL, :, place % PANEL]
        values[:, into, :, :, at // word, :, at % word] = values[:, block, :, :, place // word, :, place % word]
        if scales is not None:
            scales[:, into, :, :, at] = scales[:, block, :, :, place]

    def emit(
        self,
        b: ProgramBuilder,
        source: int,
        output: int,
        dtype: torch.dtype,
        cache: Tensor,
        spec: AttentionSpec,
        norms: Norms | None,
        cos_sin: Tensor,
        group: int = 0,
        sinks: Tensor | None = None,
        temperature: tuple[float, int, int] | None = None,
        *,
        rotates_first: bool = False,
        stores: bool = True,
    ) -> None:
        """Add one layer's operations to a program: norms of heads, rotation, the write to the cache, attention.

        Args:
            source: the buffer with q, k and v concatenated, float32; see `ProgramBuilder.rope`.
            norms: float32 weights.
            group: the layer's cache group.
            cos_sin: [max_position, rotary_dim] float32.
            sinks: as for `attend`.
            temperature, rotates_first: as in `ProgramBuilder.rope`.
            stores: if not, `source` has queries only, and the cache has the step's keys and values already.
        """
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        queries = b.scratch("queries", spec.num_heads * spec.head_dim * 4)
        q_norm, k_norm, eps = (0, 0, 0.0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr(), norms[2])
        place, cache_dtype = cache.data_ptr(), CACHE_DTYPES[cache.dtype]
        kind, table = DTYPES[dtype], cos_sin.data_ptr()
        rotary = cos_sin.shape[1]
        b.rope(
            source,
            queries,
            kind,
            heads if stores else (spec.num_heads, 0, spec.head_dim),
            rotary,
            table,
            place,
            block_stride=_stride(cache),
            cache_dtype=cache_dtype,
            group=group,
            norms=(q_norm, k_norm),
            eps=eps,
            temperature=temperature,
            rotates_first=rotates_first,
        )
        b.attend(
            queries,
            output,
            kind,
            heads,
            place,
            spec.scale,
            block_stride=_stride(cache),
            cache_dtype=cache_dtype,
            group=group,
            window=spec.window or 0,
            chunked=spec.chunked,
            soft_cap=spec.soft_cap or 0.0,
            slopes=_slopes(b, spec),
            sinks=_sinks(b, sinks),
        )

    def _run(self, builder: ProgramBuilder, step: StepInput, source: Tensor, result: Tensor | None) -> None:
        batch: StepArgs = step.attn
        batch.external[:2] = (source.data_ptr(), 0 if result is None else result.data_ptr())
        Program(self.pool, builder).run(0, len(builder.ops), batch)


def _stride(cache: Tensor) -> int:
    """Return the bytes from one block to the next."""
    return cache.stride(0) * cache.element_size()


def _slopes(b: ProgramBuilder, spec: AttentionSpec) -> int:
    """Return the address of the heads' slopes, which the program keeps; 0 for none."""
    if spec.slopes is None:
        return 0
    b.kept.append(slopes := torch.tensor(spec.slopes, dtype=torch.float32))
    return slopes.data_ptr()


def _sinks(b: ProgramBuilder, sinks: Tensor | None) -> int:
    """Return the address of the heads' sinks, which the program keeps; 0 for none."""
    if sinks is None:
        return 0
    b.kept.append(sinks)
    return sinks.data_ptr()


def native_step(step: StepInput, block_size: int) -> StepArgs:
    """Return pointers into the step's tensors, which must outlive it. Raises TypeError for a wrong layout."""
    _require_layout(step)
    group_tables, group_slots = step.group_strides
    return StepArgs(
        input_ids=step.input_ids.data_ptr(),
        positions=step.positions.data_ptr(),
        slots=step.slot_mapping.data_ptr(),
        query_start=step.query_start.data_ptr(),
        seq_lens=step.seq_lens.data_ptr(),
        block_tables=step.block_tables.data_ptr(),
        unseen=None if step.unseen is None else step.unseen.data_ptr(),
        ahead=None if step.ahead is None else step.ahead.data_ptr(),
        table_stride=step.block_tables.stride(0),
        group_tables=group_tables,
        group_slots=group_slots,
        tokens=step.num_tokens,
        rows=step.num_rows,
        block_size=block_size,
    )


def reason_against(device: torch.device, dtype: torch.dtype, spec: AttentionSpec, block_size: int) -> str | None:
    """Return the reason why the kernels can't serve this, apart from a missing compiler; None if they can."""
    if device.type != "cpu":
        return f"runs on cpu, not on {device.type}"
    if dtype not in DTYPES:
        return f"computes in {', '.join(map(str, DTYPES))}, not in {dtype}"
    if spec.head_dim % PANEL:
        return f"needs a head dimension that is a multiple of {PANEL}, not {spec.head_dim}"
    if block_size % PANEL:
        return f"needs a block size that is a multiple of {PANEL}, not {block_size}"
    return None


def _require_layout(step: StepInput) -> None:
    for name, tensor, dtype in (
        ("input_ids", step.input_ids, torch.int64),
        ("positions", step.positions, torch.int64),
        ("query_start", step.query_start, torch.int32),
        ("seq_lens", step.seq_lens, torch.int32),
        ("block_tables", step.block_tables, torch.int32),
        ("slot_mapping", step.slot_mapping, torch.int64),
        *([] if step.unseen is None else [("unseen", step.unseen, torch.int32)]),
        *([] if step.ahead is None else [("ahead", step.ahead, torch.int32)]),
    ):
        if tensor.dtype != dtype or tensor.stride(-1) != 1 or tensor.device.type != "cpu":
            raise TypeError(f"StepInput.{name} must be {dtype} on cpu with adjacent entries, not {tensor.dtype}.")
