"""Attention on NVIDIA GPUs whose results, to the bit, do not depend on what else is in the step, nor on chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.device.launch_sizes import cdiv, next_power_of_2
from octavo.device.transfer import upload_parts
from octavo.nn.attention.base import AttentionSpec, Norms
from octavo.nn.attention.triton import MANY_WRITTEN, Launches, Many, TritonAttention, rotate_and_write
from octavo.nn.attention.triton_arguments import head_terms, scales_of, two_strides
from octavo.nn.attention.triton_few import Few
from octavo.nn.attention.triton_invariant import attend_kernel, merge_kernel
from octavo.nn.step import StepInput

PART = 1024
"""Keys of a part. Another size gives other bits."""
_KEYS = 64
"""Keys of a tile, likewise."""
_ROWS = 64
"""Rows of a prompt's tile: queries times the query heads of a kv head."""
_MAX_FEW = 8
_PROGRAMS = 4
"""Programs of a multiprocessor: contexts are divided among several until there are as many."""
MOST_CHANNELS = 256


class InvariantAttention:
    """See `triton_invariant.py` for the order of sums. The rest is as in `TritonAttention`."""

    name = "invariant"
    follows_table_rows = True

    def __init__(self, dtype: torch.dtype, spec: AttentionSpec) -> None:
        self._own = TritonAttention(dtype, spec)
        self._group = next_power_of_2(spec.num_heads // spec.num_kv_heads)
        self._queries = max(1, _ROWS // self._group)

    @property
    def most_few(self) -> int:
        """See `Recordable`."""
        return _MAX_FEW

    def cache_shape(self, spec: AttentionSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """As `TritonAttention`."""
        return self._own.cache_shape(spec, num_blocks, block_size)

    def prepare(self, step: StepInput, block_size: int) -> Launches:
        """Divide the rows over launches. Reads nothing from the device if `step.query_lens` is given."""
        longest = step.max_query_len
        if longest <= _MAX_FEW and (step.ahead is None or longest == 1):
            return Launches(Few(None, step.num_rows, 1 if longest == 1 else _MAX_FEW), None)
        lens = step.query_lens if step.query_lens is not None else step.query_start.diff().tolist()
        tiles, single = self.cut(np.asarray(lens, dtype=np.int32), step.past_lens or [0] * len(lens), step.device)
        sent_tiles, sent_single = upload_parts([tiles, single], step.device)
        few = Few(sent_single, len(single), 1) if len(single) else None
        return Launches(few, Many(sent_tiles, len(tiles) // 2, longest, self._queries))

    def cut(self, lens: np.ndarray, past: Sequence[int], device: torch.device) -> tuple[np.ndarray, np.ndarray]:
        """See `Recordable`. Tiles with the most keys come first."""
        single = np.flatnonzero(lens == 1).astype(np.int32)
        several = np.flatnonzero(lens > 1).tolist()
        tiles = [(row, first) for row in several for first in range(0, lens[row], self._queries)]
        tiles.sort(key=lambda tile: -(past[tile[0]] + tile[1]))
        return np.asarray(tiles, dtype=np.int32).ravel(), single

    def most_tiles(self, tokens: int, rows: int, device: torch.device) -> int:
        """See `Recordable`."""
        return tokens // self._queries + rows

    def foreseen(self, tiles: Tensor, single: Tensor, longest: int) -> Launches:
        """See `Recordable`."""
        return Launches(Few(single, len(single), 1), Many(tiles, len(tiles) // 2, longest, self._queries))

    def sharing(self) -> tuple[int, int]:
        """See `Recordable`. Each row reads its whole context."""
        return 1, PART

    def write(self, k: Tensor, v: Tensor, cache: Tensor, step: StepInput) -> None:
        """As `TritonAttention`."""
        self._own.write(k, v, cache, step)

    def peaks(self, cache: Tensor) -> Tensor:
        """See `FusedBackend`."""
        return self._own.peaks(cache)

    def rotate_and_store(
        self,
        kv: Tensor,
        norms: Norms | None,
        cos_sin: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
    ) -> None:
        """See `FusedBackend`."""
        rotate_and_write(kv, norms, cos_sin, cache, scales, step, kept=False)

    def rotate_and_attend(
        self,
        qkv: Tensor,
        norms: Norms | None,
        cos_sin: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        rounded_by: Tensor | None = None,
    ) -> Tensor:
        """See `FusedBackend`. All keys and values are read from the cache, those of the step, too."""
        assert scales is None, "FP8 caches are refused at the start"
        assert rounded_by is None, "packed weights are, too"
        rotate_and_write(qkv, norms, cos_sin, cache, scales, step, kept=False)
        return self.attend(qkv[:, : spec.num_heads], cache, step, spec, sinks)

    def launch_ahead(
        self,
        qkv: Tensor,
        norms: Norms | None,
        cos_sin: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        rounded_by: Tensor | None = None,
    ) -> None:
        """Launch the kernels of `rotate_and_attend`, for `device/ahead.py`."""
        self.rotate_and_attend(qkv, norms, cos_sin, cache, scales, step, spec, sinks)
        if step.num_tokens < MANY_WRITTEN:
            return
        rotate_and_write(qkv, norms, cos_sin, cache, scales, step, kept=False)

    def attend_stored(
        self,
        q: Tensor,
        cache: Tensor,
        scales: Tensor | None,
        step: StepInput,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `FusedBackend`."""
        return self.attend(q, cache, step, spec, sinks)

    def attend(
        self, q: Tensor, cache: Tensor, step: StepInput, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """See `AttentionBackend`."""
        launches: Launches = step.attn
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if (many := launches.many) is not None and many.count:
            self._launch(q, cache, step, spec, sinks, out, many.tiles, None, many.count, many.queries)
        if (few := launches.few) is not None and few.count:
            self._launch(q, cache, step, spec, sinks, out, None, few.rows, few.count, few.queries)
        return out

    def _launch(
        self,
        q: Tensor,
        cache: Tensor,
        step: StepInput,
        spec: AttentionSpec,
        sinks: Tensor | None,
        out: Tensor,
        tiles: Tensor | None,
        rows: Tensor | None,
        count: int,
        queries: int,
    ) -> None:
        """Write the results of `count` tiles, or of rows: `rows`, or the step's first ones."""
        parts = cdiv(step.max_seq_len, PART)
        whole = tiles is not None or step.ahead is not None
        splits = 1 if whole else self._splits(count * spec.num_kv_heads, parts, q.device)
        cells = count * queries * spec.num_heads * parts if splits > 1 else 0
        stored = torch.empty(cells, spec.head_dim, dtype=torch.float32, device=q.device) if cells else q
        peaks, totals = torch.empty(2, cells, dtype=torch.float32, device=q.device) if cells else (q, q)
        unused = step.seq_lens
        sink_values, slopes = head_terms(spec, sinks, unused)
        height = max(16, self._group * next_power_of_2(queries))
        block_d = next_power_of_2(spec.head_dim)
        common = {
            "D": spec.head_dim,
            "BLOCK_D": block_d,
            "QUERIES": queries,
            "BLOCK_N": _KEYS,
            "PART": PART,
            "WINDOW": spec.window or 0,
            "CHUNKED": spec.chunked,
            "HAS_SINKS": sinks is not None,
            "HAS_ROWS": rows is not None,
            "enable_fp_fusion": False,
        }
        given = unused if rows is None else rows
        attend_kernel[(spec.num_kv_heads, count, splits)](
            q,
            cache,
            out,
            stored,
            peaks,
            totals,
            unused if tiles is None else tiles,
            given,
            step.query_start,
            step.seq_lens,
            unused if step.table_rows is None else step.table_rows,
            step.block_tables,
            *scales_of(spec),
            sink_values,
            slopes,
            unused if step.ahead is None else step.ahead,
            parts,
            *two_strides(q),
            *cache.stride()[:4],
            step.block_tables.stride(0),
            GROUP=spec.num_heads // spec.num_kv_heads,
            BLOCK_G=self._group,
            BLOCK_M=height,
            PAGE=cache.shape[3],
            CAPPED=spec.soft_cap is not None,
            HAS_SLOPES=spec.slopes is not None,
            AHEAD=step.ahead is not None,
            TILED=tiles is not None,
            HAS_TABLE_ROWS=step.table_rows is not None,
            SPLIT=splits > 1,
            num_warps=8 if height * block_d > 64 * 128 else 4,
            num_stages=2,
            **common,
        )
        if splits > 1:
            merge_kernel[(count * queries, spec.num_heads)](
                out, stored, peaks, totals, given, step.query_start, step.seq_lens, sink_values, parts, **common
            )

    def _splits(self, programs: int, parts: int, device: torch.device) -> int:
        """Return how many programs take turns at the parts of a context. It has no influence on results."""
        if device.type != "cuda":
            return min(parts, 2)
        wanted = _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
        return min(parts, cdiv(wanted, programs))
