"""HQQ (https://github.com/dropbox/hqq): integers with scales and zero points in floating point, fitted without data."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from octavo.models.load.quantized.integers import Integers
from octavo.models.load.quantized.method import Method, Module, Settings


class HQQ(Method):
    """`W_q`: the matrix as rows of groups (axis 1) or columns of groups (axis 0), whose parts of equal size share
    bytes, the first part in the highest bits."""

    name = "HQQ"
    suffixes = (
        "W_q",
        "scale",
        "zero",
        "nbits",
        "group_size",
        "shape",
        "axis",
        "packing",
        "unpack_view_dtype",
        "view_as_float",
        "compute_dtype",
        "offload_meta",
        "encoded_state_dict",
        "stores_quant_config",
        "channel_wise",
        "optimize",
        "round_zero",
        "quant_scale",
        "quant_zero",
    )

    def __init__(self, settings: Settings) -> None:
        """Take no settings: each module's tensors have all that is needed."""

    def modules(self, names: Set[str]) -> Set[str]:
        return self._with("W_q", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        return tuple(module.tensor("shape").tolist())

    def matrix(self, module: Module) -> Integers | Tensor:
        packed, scales, zeros = module.tensor("W_q"), module.tensor("scale"), module.tensor("zero")
        bits, (outputs, inputs) = int(module.tensor("nbits")), self.shape(module)
        kind = bytes(module.tensor("packing").tolist()).decode(errors="replace")
        if kind not in _PARTS:
            raise module.wrong("packing", f"is {kind!r}; Octavo reads {', '.join(_PARTS)}")
        by_rows = int(module.tensor("axis")) == 1
        if scales.shape != zeros.shape or not scales.numel() or outputs * inputs % scales.numel():
            raise module.wrong("scale", f"has shape {list(scales.shape)}, for a matrix [{outputs}, {inputs}]")
        groups = scales.numel()
        grouped = _parts(packed, *_PARTS[kind])[: groups if by_rows else outputs * inputs // groups]
        if by_rows and groups % outputs == 0:
            shape = (outputs, groups // outputs)
            return Integers(grouped.reshape(outputs, inputs), scales.view(shape), zeros.view(shape), bits)
        values = (grouped.float() - zeros.float()) * scales.float()
        return values.view(outputs, inputs)


def _parts(packed: Tensor, bits: int, parts: int) -> Tensor:
    shifts = torch.arange(bits * (parts - 1), -1, -bits, dtype=packed.dtype)
    return (packed[None] >> shifts.view(-1, 1, 1) & ((1 << bits) - 1)).flatten(0, 1).to(torch.uint8)


_PARTS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
"""`packing` -> bits of an integer, and integers in a stored element."""
