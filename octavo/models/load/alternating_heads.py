"""The order of a gated delta net's heads in files that store them as llama.cpp multiplies them."""

from __future__ import annotations

import re

from octavo.models.mixers.spec import GatedDeltaSpec
from octavo.models.spec import DecoderSpec

_MODULE = re.compile(r"model\.layers\.(\d+)\.linear_attn\.(\w+)")
_WHOLE_HEADS = ("v_proj", "z_proj")
_NUMBERS = ("a_proj", "b_proj", "A_log", "dt_bias")


def head_order(name: str, spec: DecoderSpec) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the stored row of each row, and the stored column of each column, of a tensor of the decoder; None where
    they are in order."""
    found = _MODULE.match(name)
    delta = None if found is None else spec.mixer_of(int(found[1]))
    if found is None or not isinstance(delta, GatedDeltaSpec):
        return None, None
    module, share = found[2], delta.heads // delta.key_heads
    heads = [j * delta.key_heads + i for i in range(delta.key_heads) for j in range(share)]
    channels = tuple(head * delta.head_dim + i for head in heads for i in range(delta.head_dim))
    if module in _WHOLE_HEADS:
        return channels, None
    if module in _NUMBERS:
        return tuple(heads), None
    if module == "conv1d":
        before = delta.convolved - len(channels)
        return (*range(before), *(before + i for i in channels)), None
    return (None, channels) if module == "out_proj" else (None, None)
