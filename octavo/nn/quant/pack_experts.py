"""Convert an expert's quantized matrix to the codes of packed experts on a GPU; see `PackedMatrices`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.device.transfer import move
from octavo.nn.ops.expert_weights import Kind, PackedMatrices
from octavo.nn.ops.floats import TILE, Floats
from octavo.nn.ops.tables import book_of
from octavo.nn.quant.blocks import alike
from octavo.nn.quant.floats import pack_floats
from octavo.nn.quant.integers import as_integers, in_groups
from octavo.nn.quant.words import codes_of_words, fits, joined_scales, largest_group, narrowed
from octavo.nn.weights import E2M1, Codebook, QuantizedBlocks

_FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_MIDDLE = 128
_MOST_WORDS = 128
_FEWEST_WORDS = 16


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One expert's matrix [N, K]; the attributes are those of `PackedMatrices`, without the dimension of experts."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    inputs: int
    group: int
    words: int
    kind: Kind
    rounds: bool
    book: Tensor | None = None
    tiled: bool = False


def pack_expert(
    parts: Sequence[QuantizedBlocks], device: torch.device, *, rounds: bool, group: int | None = None
) -> PackedMatrix | None:
    """Return fused parts of one expert as one matrix on a device; None if kernels have no such form.

    Args:
        rounds: the checkpoint's activations are rounded to 8 bits, too.
        group: inputs that share a scale, of integers; None to find out.
    """
    if any(part.order is not None for part in parts):
        return None
    matched = alike(list(parts))
    if matched is None:
        return None
    made = pack_floats(matched, device) if rounds else None
    if made is not None and made.codes.dtype == torch.int8:
        return from_floats(made)
    book = matched[0].book
    if book is not None and book.kind in _FLOATS:
        return _eight_bit_floats(matched, book, device, rounds=rounds)
    if book is not None and torch.equal(book.numbers, E2M1.numbers):
        return _four_bits(matched, device, _stored_group(matched[0]), kind="e2m1")
    integers = as_integers(parts, device)
    if integers is None:
        return None if book is None else _table(matched, book, device)
    group = group or min(largest_group(part, _sizes(integers[0].values.shape[1])) for part in integers)
    return (_four_bits if integers[0].bits == 4 else _eight_bit_integers)(integers, device, group)


def from_floats(made: Floats) -> PackedMatrix | None:
    """Return a matrix with a scale for each output, of numbers of 8 bits."""
    words = _words(made.inputs, made.inputs)
    if not words:
        return None
    return PackedMatrix(
        made.codes, made.scales[None], None, made.inputs, made.inputs, words, kind="integers", rounds=True
    )


def _eight_bit_floats(
    parts: Sequence[QuantizedBlocks], book: Codebook, device: torch.device, *, rounds: bool
) -> PackedMatrix | None:
    codes, scales = _joined(parts, device)
    inputs = codes.shape[1]
    stored = inputs // scales.shape[1]
    group = stored if stored == inputs else stored & -stored  # kernels divide inputs by powers of two
    scales = scales.repeat_interleave(stored // group, 1)
    words = _words(inputs, group)
    if not words:
        return None
    rounds = rounds and book.kind == "e4m3" and group in (_MOST_WORDS, inputs) and inputs % _MOST_WORDS == 0
    sizes = inputs, group, words
    tiled = rounds and group < inputs and _is_tiled(scales)
    codes, scales = codes.view(_FLOATS[book.kind]), _by_group(scales.float())
    return PackedMatrix(codes, scales, None, *sizes, kind="integers", rounds=rounds, tiled=tiled)


def _is_tiled(scales: Tensor) -> bool:
    """Return whether each `TILE` outputs have the same scales [N, groups]."""
    if len(scales) % TILE:
        return False
    tiles = scales.unflatten(0, (-1, TILE))
    return bool((tiles == tiles[:, :1]).all())


def _eight_bit_integers(parts: Sequence[QuantizedBlocks], device: torch.device, group: int) -> PackedMatrix | None:
    codes, _ = _joined(parts, device)
    inputs = codes.shape[1]
    words = _words(inputs, group)
    if not words:
        return None
    scales, minima = _factors(parts, group, device)
    codes = (codes ^ _MIDDLE).view(torch.int8)
    return PackedMatrix(codes, scales, minima, inputs, group, words, kind="integers", rounds=False)


def _four_bits(
    parts: Sequence[QuantizedBlocks], device: torch.device, group: int, *, kind: Kind = "integers"
) -> PackedMatrix | None:
    codes, _ = _joined(parts, device)
    inputs = codes.shape[1]
    # From the fastest on: a thread looks up all fields of its words in a table at once. Whatever the device and what
    # experts of a layer may differ in, such as minima: weights that replace these are packed on the host.
    widths = (16,) if kind == "table" else (64, 32, 16)
    words = next((words for words in widths if _fills(inputs, 4 * words) and group % words == 0), 0)
    if not words:
        return None
    scales, minima = _factors(parts, group, device)
    if kind == "e2m1" and torch.equal(scales.bfloat16().float(), scales.float()):
        scales = scales.bfloat16()  # MXFP4's, which are powers of two
    stored = codes_of_words(codes, 4, words).flatten(1)
    return PackedMatrix(stored, scales, minima, inputs, group, words, kind=kind, rounds=False)


def _table(parts: Sequence[QuantizedBlocks], book: Codebook, device: torch.device) -> PackedMatrix | None:
    """Return codes of 4 bits in any table whose numbers float16 has."""
    if book.kind != "table" or not fits(book.numbers):
        return None
    inputs, groups = parts[0].values.shape[1], parts[0].scales.shape[1]
    size = inputs // groups
    if groups > 1:
        groups *= size // (size & -size)  # the kernels' groups are powers of two
    made = _four_bits([in_groups(part, groups) for part in parts], device, inputs // groups, kind="table")
    if made is None:
        return None
    return replace(made, scales=narrowed(made.scales, book), book=book_of(book.numbers, device))


def _fills(inputs: int, block: int) -> bool:
    """Return whether padding the inputs to whole blocks adds at most a sixteenth."""
    return -inputs % block <= inputs // 16


def _words(inputs: int, group: int) -> int:
    """Return the inputs of a block of 8-bit codes, a power of two; 0 if it would be too small."""
    least = min(inputs & -inputs, group & -group, _MOST_WORDS)
    return least if least >= _FEWEST_WORDS else 0


def _stored_group(part: QuantizedBlocks) -> int:
    return part.values.shape[1] // part.scales.shape[1]


def _sizes(inputs: int) -> list[int]:
    """Return the numbers of inputs that may share a scale, from the largest on."""
    return [inputs, *(1 << i for i in range(12, 3, -1))]


def _joined(parts: Sequence[QuantizedBlocks], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values [N, K] and the scales [N, blocks] of all parts."""
    values = torch.cat([move(part.values, device) for part in parts])
    return values, torch.cat([part.scales.to(device) for part in parts])


def _factors(parts: Sequence[QuantizedBlocks], group: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    scales, minima = joined_scales(parts, group, device)
    return _by_group(scales), None if minima is None else _by_group(minima)


def _by_group(scales: Tensor) -> Tensor:
    return scales.t().contiguous()


def stacked(first: PackedMatrix, count: int, dtype: torch.dtype) -> PackedMatrices:
    """Return room for the matrices of several experts in the form of the first.

    Args:
        dtype: of activations.
    """

    def room(tensor: Tensor) -> Tensor:
        return tensor.new_empty(count, *tensor.shape)

    minima = None if first.minima is None else room(first.minima)
    form = first.inputs, first.group, first.words, first.kind, first.rounds, dtype, first.book, first.tiled
    return PackedMatrices(room(first.codes), room(first.scales), minima, *form)


def put(matrices: PackedMatrices, expert: int, one: PackedMatrix) -> None:
    """Store an expert's matrix, in the form of the others."""
    matrices.codes[expert] = one.codes
    matrices.scales[expert] = one.scales
    if matrices.minima is not None and one.minima is not None:
        matrices.minima[expert] = one.minima


def refined(matrices: PackedMatrices, one: PackedMatrix) -> PackedMatrices:
    """Return matrices with smaller groups, scales of more precision, or minima, if another expert's matrix has them."""
    scales, minima, group = matrices.scales, matrices.minima, matrices.group
    if one.group < group and not group % one.group and not one.group % matrices.words:
        scales = scales.repeat_interleave(group // one.group, 1)
        minima = None if minima is None else minima.repeat_interleave(group // one.group, 1)
        group = one.group
    if one.minima is not None and minima is None:
        minima = torch.zeros_like(scales)
    scales = scales.to(torch.promote_types(scales.dtype, one.scales.dtype))
    return replace(matrices, scales=scales, minima=minima, group=group, tiled=matrices.tiled and one.tiled)


def fitted(one: PackedMatrix, matrices: PackedMatrices) -> PackedMatrix | None:
    """Return an expert's matrix in the form of others; None if it has another one."""
    same = one.codes.dtype == matrices.codes.dtype and one.codes.shape == matrices.codes.shape[1:]
    same = same and (one.words, one.kind, one.rounds) == (matrices.words, matrices.kind, matrices.rounds)
    if not same or not _same_book(one.book, matrices.book) or one.group % matrices.group:
        return None
    repeats = one.group // matrices.group
    scales = one.scales.repeat_interleave(repeats, 0).to(matrices.scales.dtype)
    minima = None if one.minima is None else one.minima.repeat_interleave(repeats, 0)
    if matrices.minima is not None and minima is None:
        minima = torch.zeros_like(scales)
    return replace(one, scales=scales, minima=minima, group=matrices.group)


def _same_book(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
