"""bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes): NF4, FP4 and INT8."""

from __future__ import annotations

import json
import math
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from octavo.models.load.quantized.codes import Codes
from octavo.models.load.quantized.integers import Integers
from octavo.models.load.quantized.method import BYTES, SCALE_DTYPES, Method, Module, Settings
from octavo.nn.weights import Codebook

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_MOST = 127  # of INT8: `SCB` is the largest magnitude of an output's weights


class BitsAndBytes(Method):
    """4 bits: `weight` of bytes, in any shape and dtype ("bnb_4bit_quant_storage"), each of two indices of `quant_map`
    [16], the first in the high half, times `absmax` per block (https://arxiv.org/abs/2305.14314). 8 bits: `weight` int8
    [N, K] and `SCB` [N]."""

    name = "bitsandbytes"
    suffixes = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        *_STATES,
        "SCB",
        "weight_format",
    )
    scale = "SCB"

    def __init__(self, settings: Settings) -> None:
        """Take no settings: each module's tensors have all that is needed."""

    def modules(self, names: Set[str]) -> Set[str]:
        found = [self._with(suffix, names) for suffix in ("SCB", *_STATES)]
        return set().union(*found)

    def shape(self, module: Module) -> tuple[int, ...]:
        return module.shape("weight") if module.has("SCB") else tuple(_state(module)["shape"])

    def matrix(self, module: Module) -> Integers | Codes | Tensor:
        if not module.has("SCB"):
            return self._blocks(module, module.tensor("weight").flatten(), _state(module))
        weight = module.stored("weight", (torch.int8,), None, None)
        scales = (module.stored("SCB", SCALE_DTYPES, len(weight)).float() / _MOST)[:, None]
        return Integers((weight.short() + 128).to(torch.uint8), scales, torch.full_like(scales, 128), 8)

    def _blocks(self, module: Module, stored: Tensor, state: dict[str, Any]) -> Codes | Tensor:
        pairs = stored.view(torch.uint8)
        size, count = state["blocksize"], math.prod(state["shape"])
        scales = module.stored("weight.absmax", BYTES if "nested_blocksize" in state else SCALE_DTYPES, None)
        if "nested_blocksize" in state:
            block = state["nested_blocksize"]
            nested = module.stored("weight.nested_absmax", SCALE_DTYPES, -(-len(scales) // block)).float()
            steps = module.stored("weight.nested_quant_map", SCALE_DTYPES, 256).float()[scales.long()]
            outer = nested.repeat_interleave(block)[: len(scales)]
            scales = steps * outer + state["nested_offset"]
        if not 0 <= len(pairs) * 2 - count < 2 * stored.itemsize or len(scales) != -(-count // size):
            raise module.wrong("weight", f"has {len(pairs)} bytes and {len(scales)} scales for {count} weights")
        indices = torch.stack([pairs >> 4, pairs & 15], -1).flatten()[:count]
        book = Codebook("table", module.stored("weight.quant_map", SCALE_DTYPES, 16).float())
        outputs, inputs = state["shape"]
        if inputs % size == 0:
            return Codes(indices.view(outputs, inputs), scales.float().view(outputs, -1), size, book)
        return (book.of(indices) * scales.float().repeat_interleave(size)[:count]).view(state["shape"])


def _state(module: Module) -> dict[str, Any]:
    """Return what a module's quantization state says: block sizes and the matrix's shape."""
    suffix = next((state for state in _STATES if module.has(state)), _STATES[0])
    try:
        state = json.loads(bytes(module.tensor(suffix).tolist()))
        outputs, inputs = state["shape"]
        numbers: dict[str, Any] = {"blocksize": int(state["blocksize"]), "shape": [int(outputs), int(inputs)]}
        if "nested_blocksize" in state:
            numbers["nested_blocksize"] = int(state["nested_blocksize"])
            numbers["nested_offset"] = float(state["nested_offset"])
        if min(numbers["blocksize"], numbers.get("nested_blocksize", 1)) < 1:
            raise ValueError("a block has no weights")
        return numbers
    except (ValueError, KeyError, TypeError) as error:
        raise module.wrong(suffix, "is not a quantization state in JSON") from error
