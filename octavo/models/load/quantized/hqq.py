"""HQQ (https://github.com/dropbox/hqq): integers with scales and zero points in floating point, fitted without data."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from octavo.models.load.quantized.integers import Integers
from octavo.models.load.quantized.method import BYTES, SCALE_DTYPES, WORDS, Method, Module, Settings


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
        return self._with("W_q", names) | self._with("packing", names)

    def shape(self, module: Module) -> tuple[int, ...]:
        outputs, inputs = module.stored("shape", (torch.int32, torch.int64), 2).tolist()
        return outputs, inputs

    def matrix(self, module: Module) -> Integers | Tensor:
        packed, (outputs, inputs) = module.stored("W_q", BYTES + WORDS, None, None), self.shape(module)
        scales = module.stored("scale", SCALE_DTYPES, None, None)
        zeros = module.stored("zero", SCALE_DTYPES, *scales.shape)
        kind = bytes(module.tensor("packing").byte().tolist()).decode(errors="replace")
        if kind not in _PARTS:
            raise module.wrong("packing", f"is {kind!r}; Octavo reads {', '.join(_PARTS)}")
        bits, parts = _PARTS[kind]
        by_rows, groups = self._axis(module) == 1, scales.numel()
        if not groups or outputs * inputs % groups:
            raise module.wrong("scale", f"has shape {list(scales.shape)}, for a matrix [{outputs}, {inputs}]")
        size = outputs * inputs // groups
        rows, columns = (groups, size) if by_rows else (size, groups)
        module.stored("W_q", BYTES + WORDS, -(-rows // parts), columns)
        module.stored("scale", SCALE_DTYPES, *((groups, 1) if by_rows else (1, groups)))
        grouped = _parts(packed, bits, parts)[:rows]
        if by_rows and groups % outputs == 0:
            shape = (outputs, groups // outputs)
            return Integers(grouped.reshape(outputs, inputs), scales.view(shape), zeros.view(shape), bits)
        values = (grouped.float() - zeros.float()) * scales.float()
        return values.view(outputs, inputs)

    def _axis(self, module: Module) -> int:
        axis = module.tensor("axis").flatten().tolist()
        if axis not in ([0], [1]):
            raise module.wrong("axis", f"is {axis}, neither 0 nor 1")
        return int(axis[0])


def _parts(packed: Tensor, bits: int, parts: int) -> Tensor:
    shifts = torch.arange(bits * (parts - 1), -1, -bits, dtype=packed.dtype)
    return (packed[None] >> shifts.view(-1, 1, 1) & ((1 << bits) - 1)).flatten(0, 1).to(torch.uint8)


_PARTS = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4), "1bit_u8": (1, 8)}
"""`packing` -> bits of an integer, and integers in a stored element."""
