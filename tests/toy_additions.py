"""Low-rank additions to a layer's products in random blocks of a cache, as the native kernels read them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.native.bindings import Dtype, LowRank

TORCH = {Dtype.FLOAT: torch.float32, Dtype.BFLOAT: torch.bfloat16}
SLICES, TILE = 3, 128


@dataclass
class Additions:
    """Additions whose rows are in random blocks of a cache.

    Attributes:
        given: by index and part: A [rank, inputs], B [outputs, rank] and factors [outputs] or None.
    """

    dtype: Dtype
    inputs: int
    outputs: list[int]
    generator: torch.Generator
    slice_bytes: int = 5 * TILE
    given: list[list[tuple[Tensor, Tensor, Tensor | None]]] = field(default_factory=list)

    def add(self, ranks: list[int], *, factors: bool = False) -> None:
        parts = []
        for rank, outputs in zip(ranks, self.outputs, strict=True):
            a = torch.randn(rank, self.inputs, generator=self.generator) / self.inputs**0.5
            b = torch.randn(outputs, rank, generator=self.generator) / max(rank, 1) ** 0.5
            gains = torch.rand(outputs, generator=self.generator) + 0.5 if factors else None
            parts.append((a.to(TORCH[self.dtype]), b.to(TORCH[self.dtype]), gains))
        self.given.append(parts)

    def table(self, of_tokens: Tensor, of_logits: Tensor | None = None) -> LowRank:
        """Lay all out in a cache whose other bytes are NaN. The arguments are [rows] int32, each row's addition."""
        ranges, places = [], []
        for parts in self.given:
            data = bytearray()
            for a, b, factors in parts:
                rows = [[*a], [*b.T], [] if factors is None else [factors]]
                starts = [self._append(data, each) for each in rows]
                places.append([starts[0], starts[1], len(a), -1 if factors is None else starts[2]])
            ranges.append(bytes(data))
        block_bytes = SLICES * self.slice_bytes
        most = max(-(-len(data) // block_bytes) for data in ranges)
        order = torch.randperm(most * len(ranges) + 3, generator=self.generator)
        cache = torch.full((SLICES, len(order), self.slice_bytes), 255, dtype=torch.uint8)
        blocks = order[: most * len(ranges)].view(len(ranges), most).int()
        for own, data in zip(blocks.tolist(), ranges, strict=True):
            for i in range(0, len(data), self.slice_bytes):
                part = torch.frombuffer(bytearray(data[i : i + self.slice_bytes]), dtype=torch.uint8)
                number = i // self.slice_bytes
                cache[number % SLICES, own[number // SLICES], : len(part)] = part
        table = torch.tensor(places, dtype=torch.int32)
        outputs = torch.tensor(self.outputs, dtype=torch.int32)
        self.kept = cache, blocks, table, outputs, of_tokens, of_logits
        return LowRank(
            memory=cache.data_ptr(),
            blocks=blocks.data_ptr(),
            places=table.data_ptr(),
            outputs=outputs.data_ptr(),
            of_tokens=of_tokens.data_ptr(),
            of_logits=0 if of_logits is None else of_logits.data_ptr(),
            slice_stride=cache.stride(0),
            slice_bytes=self.slice_bytes,
            slices=SLICES,
            tile_bytes=TILE,
            block_stride=most,
            parts=len(self.outputs),
            dtype=self.dtype,
        )

    @staticmethod
    def _append(data: bytearray, rows: list[Tensor]) -> int:
        start = len(data) // TILE
        for row in rows:
            data += row.contiguous().view(torch.uint8).numpy().tobytes()
            data += b"\xff" * (-len(data) % TILE)
        return start

    def applied(self, x: Tensor, y: Tensor, of_tokens: Tensor) -> Tensor:
        """y [T, out] with each row's addition, in float64."""
        y = y.double().clone()
        for t, index in enumerate(of_tokens.tolist()):
            if index < 0:
                continue
            for part, (a, b, factors) in zip(y[t].split(self.outputs), self.given[index], strict=True):
                part += b.double() @ (a.double() @ x[t].double())
                if factors is not None:
                    part *= factors.double()
        return y
