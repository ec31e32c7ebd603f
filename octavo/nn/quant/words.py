"""Convert quantized matrices to the words that the kernels of a GPU read; see `nn/ops/triton_words.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.device.transfer import move
from octavo.nn.ops.tables import book_of
from octavo.nn.ops.words import Words
from octavo.nn.quant.integers import in_groups
from octavo.nn.weights import Codebook, QuantizedBlocks

_WIDTHS = (64, 32, 16)
_FILLED = 16
"""Blocks may be filled up with at most this fraction of the inputs."""
_FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_LEAST, _MOST = 2.0**-14, 65504.0  # of float16's normal numbers


def pack_words(parts: Sequence[QuantizedBlocks], device: torch.device, group: int | None = None) -> Words:
    """Return the parts, which have the same bits, zero point, inputs and order, as one matrix on a device.

    Args:
        group: inputs that share scale and minimum, which divide a block's or are a multiple, or all; None to find out.
    """
    bits, inputs = parts[0].bits, parts[0].values.shape[1]
    width, group = _form(parts, group)
    codes = torch.cat([codes_of_words(move(part.values, device), bits, width) for part in parts])
    scales, minima = joined_scales(parts, group, device)
    order = None if parts[0].order is None else parts[0].order.to(device)
    return Words(codes, scales, minima, order, codes.shape[0], inputs, bits, group)


def pack_codes(parts: Sequence[QuantizedBlocks], device: torch.device) -> Words | None:
    """Return codes of one codebook, with the same groups, as one matrix on a device; None for other parts, and for
    tables whose numbers float16 lacks."""
    book = parts[0].book
    if book is None or (book.kind != "table" and book.kind not in _FLOATS):
        return None
    if book.kind == "table" and not fits(book.numbers):
        return None
    words = pack_words(in_powers(parts), device)
    scales = narrowed(words.scales, book)
    return replace(words, scales=scales, kind=book.kind, book=_book(book, device))


def in_powers(parts: Sequence[QuantizedBlocks]) -> list[QuantizedBlocks]:
    """Return parts with the same groups in groups of a power of two, as kernels have them, or of all inputs."""
    groups = parts[0].scales.shape[1]
    size = parts[0].values.shape[1] // groups
    if groups > 1:
        groups *= size // (size & -size)
    return [in_groups(part, groups) for part in parts]


def unpack_words(words: Words) -> Tensor:
    """Return the matrix's values [N, K] in float32, in its order of inputs."""
    shifts = torch.arange(0, 16, words.bits, dtype=torch.int32, device=words.codes.device)
    fields = words.codes[:, :, None, :].int() >> shifts[:, None] & ((1 << words.bits) - 1)
    numbers = _numbers(words, fields.flatten(1)[:, : words.inputs])
    place = torch.arange(words.inputs, device=numbers.device) // words.group
    values = numbers * words.scales.float()[:, place]
    return values if words.minima is None else values + words.minima.float()[:, place]


def _numbers(words: Words, fields: Tensor) -> Tensor:
    if words.kind == "integers":
        return (fields - (1 << (words.bits - 1))).float()
    if words.table is not None:
        return words.table.float()[fields]
    return fields.to(torch.uint8).view(_FLOATS[words.kind]).float()


def _book(book: Codebook, device: torch.device) -> Tensor | None:
    """Return a table's numbers as `Words` has them; None for floats."""
    return book_of(book.numbers, device) if book.kind == "table" else None


def narrowed(scales: Tensor, book: Codebook) -> Tensor:
    """Return float32 scales in the bfloat16 that is equal, or of a table in float16 if it has their precision."""
    if torch.equal(scales.bfloat16().float(), scales):
        return scales.bfloat16()
    return scales.half() if book.kind == "table" and fits(scales) else scales


def fits(factors: Tensor) -> bool:
    """Return whether float16 has these factors with its full precision."""
    sizes = factors.abs()
    return bool(((sizes == 0) | ((sizes >= _LEAST) & (sizes <= _MOST))).all())


def codes_of_words(values: Tensor, bits: int, width: int) -> Tensor:
    """Convert integers [N, K] uint8 to words [N, blocks, width]."""
    fields = 16 // bits
    padded = F.pad(values, (0, -values.shape[1] % (width * fields))).view(len(values), -1, fields, width)
    words = torch.zeros(len(values), padded.shape[1], width, dtype=torch.int16, device=values.device)
    for i in range(fields):
        words |= padded[:, :, i].short() << bits * i
    return words


def joined_scales(parts: Sequence[QuantizedBlocks], group: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the parts' scales, and their minima unless all are 0, as one matrix each: [N, inputs / group].

    Args:
        group: inputs that share scale and minimum; a multiple of the stored groups.
    """
    every = group * parts[0].scales.shape[1] // parts[0].values.shape[1]
    scales = torch.cat([part.scales[:, ::every].to(device) for part in parts])
    if all(part.minima is None for part in parts):
        return scales, None
    minima = (torch.zeros_like(part.scales) if part.minima is None else part.minima for part in parts)
    return scales, torch.cat([part[:, ::every].to(device) for part in minima])


def _form(parts: Sequence[QuantizedBlocks], known: int | None) -> tuple[int, int]:
    """Return the words of a block, and the inputs of a group: the widest blocks whose fields have one scale each, and
    that need little filling up."""
    inputs, fields = parts[0].values.shape[1], 16 // parts[0].bits
    for width in _WIDTHS:
        size = width * fields
        if -inputs % size <= inputs // _FILLED or width == _WIDTHS[-1]:
            group = known or min(largest_group(part, _sizes(inputs, size)) for part in parts)
            if group >= width:
                return width, group
    raise AssertionError("each 16 inputs have one scale")


def _sizes(inputs: int, size: int) -> list[int]:
    """Return the numbers of inputs that may share a scale: all inputs, a multiple of `size`, or a divisor of it."""
    return [inputs, *(size << i for i in range(5, 0, -1)), *(size >> i for i in range(size.bit_length()))]


def largest_group(blocks: QuantizedBlocks, sizes: Sequence[int]) -> int:
    """Return the first of `sizes` whose adjacent inputs share scale and minimum everywhere."""
    inputs = blocks.values.shape[1]
    block = inputs // blocks.scales.shape[1]
    both = [blocks.scales] if blocks.minima is None else [blocks.scales, blocks.minima]
    # Compared with their neighbours at once: a device is waited for once, not for each size.
    differ = torch.stack([(one[:, 1:] != one[:, :-1]).any(0) for one in both]).any(0).cpu()
    begins = (differ.nonzero().flatten() + 1) * block
    return next(one for one in sizes if one >= block and inputs % one == 0 and not (begins % one).any())
