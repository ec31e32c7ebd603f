"""Convert E4M3 and places in tables of 16 numbers for the CUDA kernels of a Hopper GPU, else for those in Triton."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.nn.ops import fragments, nvrtc
from octavo.nn.ops.fragments import SCALE_UNITS, Fragments, Kind
from octavo.nn.ops.words import Words
from octavo.nn.quant.fragments import LIMIT, arranged, deviations_of, sizes
from octavo.nn.quant.words import fits, in_powers, joined_scales, largest_group, pack_codes
from octavo.nn.weights import Codebook, QuantizedBlocks

_KINDS: dict[str, Kind] = {"e4m3": "e4m3", "table": "table"}
"""Kind of `Codebook` -> kind of `Fragments`."""
_NAMES = {"e4m3": "E4M3 weights are", "table": "4-bit codes are"}
_PRECISION = 2.0**-9
"""Largest error of a scale in float16, relative to its output's largest: half that of bfloat16."""
_LEAST, _MOST = 2.0**-15, 65504.0
"""The largest value of an output, at least and at most, such that float16 has that precision of all its values."""
_OUTPUTS, _INPUTS = 192, 384
"""Size of trials."""
_TRIED = {"e4m3": (32, _INPUTS), "table": (64,)}
"""Kind -> groups of trials."""


def pack_numbers(
    parts: Sequence[QuantizedBlocks], device: torch.device, dtype: torch.dtype
) -> Words | Fragments | None:
    """Return codes of one codebook, with the same groups, as one matrix on a device; None if no kernel multiplies with
    it.

    Args:
        dtype: of the activations.
    """
    kind = None if parts[0].book is None else _KINDS.get(parts[0].book.kind)
    made = pack_coded(parts, device) if kind is not None and dtype.itemsize == 2 and usable(device, kind) else None
    return pack_codes(parts, device) if made is None else made


@functools.cache
def usable(device: torch.device, kind: Kind) -> bool:
    """Return whether the CUDA kernels of a kind run on a device and compute a trial right; log why they don't."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return nvrtc.trusted(f"{_NAMES[kind]} multiplied", functools.partial(_deviations, device, kind), LIMIT)


def pack_coded(parts: Sequence[QuantizedBlocks], device: torch.device) -> Fragments | None:
    """Return codes of one codebook, with the same groups, as one matrix on a device; None if its sizes don't fit, or
    float16 lacks numbers or scales."""
    book, inputs = parts[0].book, parts[0].values.shape[1]
    assert book is not None, "integers have no codes"
    divided, outputs = in_powers(parts), sum(part.values.shape[0] for part in parts)
    group = min(largest_group(part, sizes(inputs)) for part in divided)
    minima = any(part.minima is not None for part in parts)
    if minima or not fragments.fits(outputs, inputs, group) or (book.kind == "table" and not fits(book.numbers)):
        return None
    kind = _KINDS[book.kind]
    scales = joined_scales(divided, group, device)[0].float() / SCALE_UNITS[kind]
    if not _precise(scales, book):
        scales = scales.masked_fill(_zeros(parts, book, scales), 0)
    return arranged(parts, kind, scales.half()) if _precise(scales, book) else None


def _precise(scales: Tensor, book: Codebook) -> bool:
    """Return whether float16 has scales [N, G], and their products with all numbers, precisely enough."""
    largest, number = scales.abs().amax(1), float(book.numbers.nan_to_num().abs().max())
    close = (scales.half().float() - scales).abs().amax(1) <= _PRECISION * largest
    fine = (close & (largest * number >= _LEAST)) | (largest == 0)
    return bool(fine.all() & (largest.max() * max(1.0, number) <= _MOST))


def _zeros(parts: Sequence[QuantizedBlocks], book: Codebook, scales: Tensor) -> Tensor:
    """Return a mask of groups whose numbers are all 0, so that any scale will do: [N, G] like scales."""
    differs = (book.numbers != 0).to(scales.device)
    groups = (part.values.to(scales.device).unflatten(1, (scales.shape[1], -1)) for part in parts)
    return ~torch.cat([differs[part.int()].any(2) for part in groups])


def _deviations(device: torch.device, kind: Kind) -> list[float]:
    """Return the relative errors of products with random codes."""
    random, trials = torch.Generator().manual_seed(0), []
    for group in _TRIED[kind]:
        blocks = _trial(kind, group, random)
        matrix = pack_coded([blocks], device)
        assert matrix is not None, "kernels have the sizes and scales of trials"
        trials.append((blocks, matrix))
    return deviations_of(trials, random)


def _trial(kind: Kind, group: int, random: torch.Generator) -> QuantizedBlocks:
    """Return a random matrix that float16 has the scales of."""
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = floats if kind == "e4m3" else torch.linspace(-1.0, 0.9, 16)
    codes = torch.randint(0, len(numbers), (_OUTPUTS, _INPUTS), generator=random, dtype=torch.uint8)
    codes[numbers[codes.int()].isnan()] = 0
    scales = (torch.rand(_OUTPUTS, _INPUTS // group, generator=random) + 0.5) / 100
    book = Codebook("e4m3" if kind == "e4m3" else "table", numbers)
    return QuantizedBlocks(codes, scales, None, 0, book.bits, book=book)
