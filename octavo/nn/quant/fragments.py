"""Convert matrices of integers to the order in which the CUDA kernels of a Hopper GPU read them; see
`nn/ops/fragments.py`. Other numbers are converted by `coded_fragments.py`.

The matrix units take a left operand of 16 x 16 values from the 32 threads of a warp: thread 4 a + b has values 2 b,
2 b + 1, 2 b + 8 and 2 b + 9 of rows a and a + 8. 16 bytes of a thread are its 4-bit codes of four such operands, for 64
inputs, or its 8-bit codes of two. They are in the order in which shifts and masks find two adjacent values; but places
in a table in the order of values, since four of them are looked up at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.device.transfer import move
from octavo.nn.ops import few_fragments, fragments, nvrtc
from octavo.nn.ops.fragments import SCALE_UNITS, Fragments, Kind
from octavo.nn.ops.ring import RowForm
from octavo.nn.ops.tables import book_of, numbers_in
from octavo.nn.ops.words import Words
from octavo.nn.quant.blocks import dequantized
from octavo.nn.quant.words import joined_scales, largest_group, pack_words
from octavo.nn.weights import QuantizedBlocks

_BLOCK = 32
_STEP = 64
_MULTIPLES = 6
_MIDDLE = 128
LIMIT = 0.02
"""Largest relative error of the trial."""
_FEW = 5
_TRIED_ROWS = (1, _FEW, 10, 150)


def pack_integers(
    parts: Sequence[QuantizedBlocks], device: torch.device, dtype: torch.dtype, group: int | None = None
) -> Words | Fragments:
    """Return the parts, which have the same bits, zero point, inputs and order, as one matrix on a device.

    Args:
        dtype: of the activations.
        group: inputs that share scale and minimum; None to find out.
    """
    if dtype.itemsize == 2 and usable(device):
        outputs, inputs = sum(part.values.shape[0] for part in parts), parts[0].values.shape[1]
        size = group or min(largest_group(part, sizes(inputs)) for part in parts)
        if fragments.fits(outputs, inputs, size):
            return pack_fragments(parts, device, size)
    return pack_words(parts, device, group)


@functools.cache
def usable(device: torch.device) -> bool:
    """Return whether the CUDA kernels run on a device and compute a trial right; log why they don't."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return nvrtc.trusted("4- and 8-bit weights are multiplied", functools.partial(_deviations, device), LIMIT)


def _deviations(device: torch.device) -> list[float]:
    """Return the relative errors of products with random integers."""
    random = torch.Generator().manual_seed(0)
    trials = [_trial(bits, random) for bits in (4, 8)]
    return deviations_of([(blocks, pack_fragments([blocks], device, group)) for blocks, group in trials], random)


def deviations_of(trials: Sequence[tuple[QuantizedBlocks, Fragments]], random: torch.Generator) -> list[float]:
    """Return the relative errors of products of some numbers of random rows with matrices on a device, compared
    with float32 on the CPU."""
    dtype, matrices = torch.bfloat16, [matrix for _, matrix in trials]
    form = RowForm(gated=False, normed=False, biased=False, added=False, x_float=False, out_float=True)
    for matrix in matrices:
        fragments.compile_row_ahead(matrix, dtype, form)
        few_fragments.compile_ahead(matrix, dtype, only=_FEW)
        for rows in _TRIED_ROWS[2:]:
            fragments.compile_ahead(matrix, dtype, only=fragments.tile_rows(rows))
    deviations = []
    for blocks, matrix in trials:
        values, device = dequantized(blocks, torch.float32), matrix.codes.device
        for rows in _TRIED_ROWS:
            x = torch.randn(rows, matrix.inputs, generator=random).to(dtype)
            if rows == 1:
                made = fragments.row_product(x.to(device), matrix, dtype=torch.float32, narrow=dtype)
            elif rows == _FEW:
                made = few_fragments.product(x.to(device), matrix, dtype=torch.float32)
            else:
                made = fragments.product(x.to(device), matrix, None, torch.float32)
            expected = x.float() @ values.T
            deviations.append(float((made.cpu() - expected).norm() / expected.norm()))
    return deviations


def _trial(bits: int, random: torch.Generator) -> tuple[QuantizedBlocks, int]:
    """Return a random matrix and its groups' size: 4 bits with minima in groups, 8 bits with a scale per output."""
    outputs, inputs = 3 * _STEP, 6 * _STEP
    values = torch.randint(0, 1 << bits, (outputs, inputs), generator=random, dtype=torch.uint8)
    group = 2 * _STEP if bits == 4 else inputs
    scales = torch.rand(outputs, inputs // group, generator=random).half().repeat_interleave(group // _BLOCK, 1)
    minima = (0.5 - scales) if bits == 4 else None
    return QuantizedBlocks(values, scales, minima, 1 << (bits - 1), bits), group


def pack_fragments(parts: Sequence[QuantizedBlocks], device: torch.device, group: int) -> Fragments:
    """Return integers as one matrix on a device, whose sizes and groups `fragments.fits` accepts."""
    scales, minima = joined_scales(parts, group, device)
    return arranged(parts, "integers", scales, minima)


def arranged(parts: Sequence[QuantizedBlocks], kind: Kind, scales: Tensor, minima: Tensor | None = None) -> Fragments:
    """Return the parts as one matrix.

    Args:
        scales, minima: [N, G] float16 of all outputs, on the matrix's device; scales as `Fragments` stores them.
    """
    first, device, inputs = parts[0], scales.device, parts[0].values.shape[1]
    group = inputs // scales.shape[1]
    codes = _codes(torch.cat([move(part.values, device) for part in parts]), first.bits, kind)
    together = _by_thread([scales] if minima is None else [scales, minima], group)
    order = None if first.order is None else first.order.to(device)
    book = book_of(first.book.numbers, device) if first.book is not None and kind == "table" else None
    return Fragments(codes, together, order, len(scales), inputs, first.bits, group, kind, book)


def unpack_fragments(matrix: Fragments) -> Tensor:
    """Return the matrix's values [N, K] in float32, in its order of inputs."""
    numbers = _numbers(matrix)
    place = torch.arange(matrix.inputs, device=numbers.device) // matrix.group
    scales, *minima = (one.float()[:, place] for one in _by_output(matrix.scales))
    return numbers * (scales * SCALE_UNITS[matrix.kind]) + sum(minima)


def _numbers(matrix: Fragments) -> Tensor:
    """Return what the codes stand for, [N, K] float32."""
    codes = _unpacked(matrix)
    if matrix.book is not None:
        return numbers_in(matrix.book).float()[codes]
    if matrix.kind == "e4m3":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    return codes.float() - (1 << (matrix.bits - 1))


def sizes(inputs: int) -> list[int]:
    """Return the numbers of inputs that may share a scale, from the largest on."""
    return [inputs, *(_STEP << i for i in range(_MULTIPLES, -1, -1)), _BLOCK, _BLOCK // 2]


def _codes(values: Tensor, bits: int, kind: Kind) -> Tensor:
    """Arrange codes [N, K] uint8 as threads read them; see `Fragments`."""
    outputs, inputs = values.shape
    values = values ^ _MIDDLE if bits == 8 and kind == "integers" else values
    # Strip of 64 outputs, warp, upper 8 outputs, a; step, operand of the step, upper 8 inputs, b, second of a pair.
    by_thread = values.view(outputs // _STEP, 4, 2, 8, inputs // _STEP, 4, 2, 4, 2)
    if bits == 4:
        pairs = (6, 2, 8) if kind == "table" else (8, 6, 2)
        fields = by_thread.permute(0, 4, 1, 3, 7, 5, *pairs).flatten(-3)
        shape = (outputs // _STEP, inputs // _STEP, 1, 128, 4)
    else:
        fields = by_thread.permute(0, 4, 5, 1, 3, 7, 6, 8, 2).unflatten(2, (2, 2)).permute(0, 1, 2, 4, 5, 6, 3, 7, 8, 9)
        fields, shape = fields.flatten(-2), (outputs // _STEP, inputs // _STEP, 2, 128, 4)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=values.device)
    for i in range(fields.shape[-1]):
        words |= fields[..., i].int() << bits * i
    return words.reshape(shape)


def _unpacked(matrix: Fragments) -> Tensor:
    """Return a matrix's codes [N, K], as `_codes` took them."""
    strips, steps = matrix.outputs // _STEP, matrix.inputs // _STEP
    shifts = torch.arange(0, 32, matrix.bits, dtype=torch.int32, device=matrix.codes.device)
    fields = matrix.codes[..., None] >> shifts & ((1 << matrix.bits) - 1)
    if matrix.bits == 4:
        places = (7, 3, 1, 5, 6, 4, 8) if matrix.kind == "table" else (8, 3, 1, 5, 7, 4, 6)
        by_thread = fields.view(strips, steps, 4, 8, 4, 4, 2, 2, 2).permute(0, 2, *places)
    else:
        by_thread = fields.view(strips, steps, 2, 4, 8, 4, 2, 2, 2, 2).permute(0, 3, 9, 4, 1, 2, 6, 7, 5, 8)
    codes = by_thread.reshape(matrix.outputs, matrix.inputs)
    return codes ^ _MIDDLE if matrix.bits == 8 and matrix.kind == "integers" else codes


def _by_thread(each: Sequence[Tensor], group: int) -> Tensor:
    """Arrange scales, or scales and minima, [N, G] each, as threads read them: [N / 64, G / S, 4, 8, S, V, 2]."""
    groups = _STEP // group if group < _STEP else 1
    return (
        torch.stack([one.view(-1, 4, 2, 8, one.shape[1] // groups, groups) for one in each], -1)
        .permute(0, 4, 1, 3, 5, 6, 2)
        .contiguous()
    )


def _by_output(scales: Tensor) -> list[Tensor]:
    """Return scales, or scales and minima, [N, G] each, of those that threads read."""
    strips, steps, _, _, groups, _, _ = scales.shape
    return [one.reshape(strips * _STEP, steps * groups) for one in scales.permute(5, 0, 2, 6, 3, 1, 4)]
