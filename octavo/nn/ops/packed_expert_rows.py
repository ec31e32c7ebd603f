"""Products of single tokens' rows with their packed experts on a Hopper GPU, by the CUDA kernel of
`cuda/packed_expert_row.cu`.

In Triton (`triton_packed_experts.py`), which serves all other cases, the widening of codes takes longer than reading
them.
"""

from __future__ import annotations

import functools
from ctypes import c_float, c_int
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.device.launch_sizes import cdiv
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.ops import nvrtc, stored_row
from octavo.nn.ops.expert_weights import Kind, PackedMatrices, gate_arguments
from octavo.nn.ops.nvrtc import Kernel, address
from octavo.nn.ops.routing import Routing

_LINE = 16
"""Bytes that rows of codes and of inputs are multiples of."""
_SPAN = 128
"""Bytes of a row of codes that a warp takes at a time."""
_MOST_WARPS = {True: 8, False: 24}
"""Of a block of the first product, and of the second one."""
_LEAST_BLOCKS = {True: 3, False: 1}
"""Of a multiprocessor, which limits the registers of a thread."""
_MOST_SHARED = 96 * 1024
_STRIP = {True: 8, False: 16}
"""Outputs of a block, of either product."""
_BYTES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1, torch.int8: 2}
"""Codes of 8 bits -> FORM of row.cuh."""
_WORDS = 4
"""FORM of codes of 4 bits."""
_FIELDS = (16, 32, 64)
"""Words that a block of these may have."""
_ENDLESS = 1 << 24
"""A group that no matrix fills."""
_LIMIT = 0.01
"""Largest relative error of the trial."""


class Form(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        outputs, inputs, experts: of one of the matrices, and how many there are.
        codes, words, kind, group: as in `PackedMatrices`; group is 0 for one scale of each output.
        line: bytes of a row of codes.
        groups: of a row.
        dtype: of the activations.
        x, out: dtypes of rows and results.
        added: `out` is of the sum with something.
    """

    first: bool
    outputs: int
    inputs: int
    experts: int
    top_k: int
    codes: torch.dtype
    words: int
    line: int
    kind: Kind
    group: int
    groups: int
    minima: bool
    scales: torch.dtype
    dtype: torch.dtype
    x: torch.dtype
    out: torch.dtype
    normed: bool
    clamped: bool
    biased: bool
    weighted: bool
    added: bool

    @property
    def span(self) -> int:
        """Inputs of a span."""
        return _SPAN * (2 if self.codes == torch.int16 else 1)

    @property
    def spans(self) -> int:
        return cdiv(self.line, _SPAN)

    @property
    def warps(self) -> int:
        """Warps of a block; of the second product, each row is prepared by as many of them."""
        rows, most = 1 if self.first else self.top_k, _MOST_WARPS[self.first]
        each = max(1, min(self.spans, most // rows))
        return rows * cdiv(self.spans, cdiv(self.spans, each))

    @property
    def held(self) -> int:
        """Groups of a span, at most."""
        return self.span // min(self.group or _ENDLESS, self.span)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: rows of 16 bits, and sums of their groups in float32."""
        return (1 if self.first else self.top_k) * self.spans * (2 * self.span + 4 * self.held)


def serves(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    matrices: PackedMatrices,
    form: ExpertsForm,
    top_k: int,
    *,
    first: bool,
) -> bool:
    """Return whether `gate_rows`, if `first`, or `sum_rows` compute a product of these experts.

    Args:
        norm: as in `gate_rows`; None for `sum_rows`.
    """
    plain = form.gated and (form.activation == "silu" or form.clamped is not None)
    if (first and not plain) or matrices.dtype.itemsize != 2 or not _fits(matrices, first=first):
        return False
    narrow, wide = x.dtype == matrices.dtype, x.dtype == torch.float32
    if not (narrow if norm is None else (narrow or wide) and norm[0].dtype == matrices.dtype):
        return False
    made = _form_of(matrices, form, top_k, matrices.dtype, matrices.dtype, first=first)
    return made.warps <= _MOST_WARPS[first] and made.shared <= _MOST_SHARED and usable(x.device)


def _fits(matrices: PackedMatrices, *, first: bool) -> bool:
    codes, scales, minima = matrices.codes, matrices.scales, matrices.minima
    span = _SPAN * (2 if matrices.fields > 1 else 1)
    outputs = codes.shape[1] // (2 if first else 1)
    # Four threads have the inputs of at most two groups.
    least = 16 if matrices.fields > 1 else 32
    whole = scales.shape[1] == 1 or matrices.group % span == 0
    in_groups = whole or (span % matrices.group == 0 and matrices.group >= least)
    in_blocks = matrices.fields == 1 or matrices.words in _FIELDS
    alike = minima is None or (minima.dtype == scales.dtype and minima.is_contiguous())
    lines = matrices.inputs * 2, codes.shape[2] * codes.element_size()
    aligned = not any(line % _LINE for line in lines) and outputs % _STRIP[first] == 0
    return in_groups and in_blocks and aligned and alike and codes.is_contiguous() and scales.is_contiguous()


@functools.cache
def usable(device: torch.device) -> bool:
    """Return whether the kernels run on a device and compute a trial right; log why not. Call it before steps are
    recorded, since it synchronizes the device."""
    if not stored_row.runs(device):
        return False
    trial = functools.partial(_deviations, device)
    return nvrtc.trusted("Products of packed experts with single rows are computed", trial, _LIMIT)


def gate_rows(
    x: Tensor,
    norm: tuple[Tensor, float] | None,
    routing: Routing,
    matrices: PackedMatrices,
    bias: Tensor | None,
    begin: int,
    form: ExpertsForm,
) -> Tensor:
    """See `gate_rows` in `expert_rows.py`."""
    choices, top_k = routing.experts.numel(), routing.experts.shape[1]
    inner = torch.empty(choices, form.size, dtype=matrices.dtype, device=x.device)
    made = _form_of(
        matrices,
        form,
        top_k,
        x.dtype,
        inner.dtype,
        first=True,
        normed=norm is not None,
        biased=bias is not None,
    )
    scale, eps = norm if norm is not None else (x, 0.0)
    _launch(
        made, (form.size // _STRIP[True], choices, 1), x, scale, eps, routing, matrices, bias, x, inner, begin, form
    )
    return inner


def sum_rows(
    inner: Tensor,
    routing: Routing,
    matrices: PackedMatrices,
    bias: Tensor | None,
    begin: int,
    form: ExpertsForm,
    out: Tensor,
    added: Tensor | None,
) -> Tensor:
    """See `sum_rows` in `packed_experts.py`; `added` is of the dtype of `out`."""
    made = _form_of(
        matrices,
        form,
        routing.experts.shape[1],
        inner.dtype,
        out.dtype,
        first=False,
        biased=bias is not None,
        added=added is not None,
    )
    grid = (form.hidden_size // _STRIP[False], len(out), 1)
    _launch(made, grid, inner, inner, 0.0, routing, matrices, bias, out if added is None else added, out, begin, form)
    return out


def _launch(
    made: Form,
    grid: tuple[int, int, int],
    x: Tensor,
    norm: Tensor,
    eps: float,
    routing: Routing,
    matrices: PackedMatrices,
    bias: Tensor | None,
    added: Tensor,
    out: Tensor,
    begin: int,
    form: ExpertsForm,
) -> None:
    alpha, limit, _ = gate_arguments(form)
    _kernel(made).launch(
        grid,
        [
            address(x),
            address(norm),
            address(matrices.codes),
            address(matrices.scales),
            address(matrices.scales if matrices.minima is None else matrices.minima),
            address(matrices.scales if matrices.book is None else matrices.book),
            address(x if bias is None else bias),
            address(routing.weights),
            address(routing.experts),
            address(added),
            address(out),
            c_int(begin),
            *map(c_float, (eps, alpha, limit)),
        ],
    )


def _form_of(
    matrices: PackedMatrices,
    form: ExpertsForm,
    top_k: int,
    x: torch.dtype,
    out: torch.dtype,
    *,
    first: bool,
    normed: bool = False,
    biased: bool = False,
    added: bool = False,
) -> Form:
    return Form(
        first=first,
        outputs=matrices.codes.shape[1] // (2 if first else 1),
        inputs=matrices.inputs,
        experts=len(matrices),
        top_k=top_k,
        codes=matrices.codes.dtype,
        words=matrices.words,
        line=matrices.codes.shape[2] * matrices.codes.element_size(),
        kind=matrices.kind,
        group=0 if matrices.scales.shape[1] == 1 else matrices.group,
        groups=matrices.scales.shape[1],
        minima=matrices.minima is not None,
        scales=matrices.scales.dtype,
        dtype=matrices.dtype,
        x=x,
        out=out,
        normed=normed,
        clamped=first and form.clamped is not None,
        biased=biased,
        weighted=form.on_inputs == first,
        added=added,
    )


@functools.cache
def _kernel(made: Form) -> Kernel:
    source, macros = source_of(made)
    return Kernel("packed_expert_row", source, macros, 32 * made.warps, made.shared)


def source_of(made: Form) -> tuple[str, dict[str, int]]:
    """Return source and macros."""
    words = made.codes == torch.int16
    macros = {"FIRST": int(made.first), "N": made.outputs, "K": made.inputs, "LINE": made.inputs}
    macros |= {"WARPS": made.warps, "ROWS": 1 if made.first else made.top_k, "TOP_K": made.top_k}
    macros |= {"OWNED": made.experts, "GROUPS": made.groups, "LINE_BYTES": made.line, "GATED": 0}
    macros |= {"FORM": _WORDS if words else _BYTES[made.codes], "BITS": 4 if words else 8, "FIELD": made.words}
    macros |= {"TABLE": int(made.kind == "table"), "E2M1": int(made.kind == "e2m1"), "E4M3": 0, "E5M2": 0}
    macros |= {"GROUP": made.group or _ENDLESS, "MINIMA": int(made.minima), "HALF": int(made.dtype == torch.float16)}
    macros |= {"SCALE_BYTES": made.scales.itemsize, "BRAIN": int(made.scales == torch.bfloat16)}
    macros |= {"NORMED": int(made.normed), "CLAMPED": int(made.clamped), "BIASED": int(made.biased)}
    macros |= {"WEIGHTED": int(made.weighted), "ADDED": int(made.added)}
    macros |= {"X_FLOAT": int(made.x == torch.float32), "OUT_FLOAT": int(made.out == torch.float32)}
    macros |= {"DEPTH": 1, "BLOCKS": _LEAST_BLOCKS[made.first]}
    parts = "integers.cuh", "codes.cuh", "copies.cuh", "row.cuh", "packed_numbers.cuh", "packed_expert_row.cu"
    return nvrtc.source_of(*parts), macros


def _deviations(device: torch.device) -> list[float]:
    """Return the relative errors of both products of two tokens with 4 bits in groups, and with 8 bits."""
    hidden, size, count, top_k = 320, 192, 3, 2
    generator = torch.Generator().manual_seed(0)
    form = ExpertsForm(num_experts=count, hidden_size=hidden, size=size)
    experts = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    weights = torch.rand(2, top_k, generator=generator)
    routing = Routing(weights.to(device), experts.to(device))
    x = torch.randn(2, hidden, generator=generator).to(device, torch.bfloat16)
    shapes, deviations = ((2 * size, hidden), (hidden, size)), []
    trials = [[_random(bits, count, *shape, generator, device) for shape in shapes] for bits in (4, 8)]
    for one, first in ((one, first) for trial in trials for one, first in zip(trial, (True, False), strict=True)):
        nvrtc.compile_ahead(*source_of(_form_of(one, form, top_k, x.dtype, x.dtype, first=first)))
    for gate_up, down in trials:
        inner = gate_rows(x, None, routing, gate_up, None, 0, form)
        got = sum_rows(inner, routing, down, None, 0, form, torch.empty_like(x), None)
        for token in range(2):
            expected = torch.zeros(hidden, device=device)
            for slot in range(top_k):
                expert = int(experts[token, slot])
                gate, up = F.linear(x[token].float(), gate_up.values(expert)).chunk(2)
                expected += weights[token, slot].to(device) * F.linear(F.silu(gate) * up, down.values(expert))
            deviations.append(float((got[token].float() - expected).norm() / expected.norm()))
    return deviations


def _random(
    bits: int, count: int, outputs: int, inputs: int, generator: torch.Generator, device: torch.device
) -> PackedMatrices:
    """Return random matrices, whose products have about the variance of their inputs."""
    group, words = (64, 16) if bits == 4 else (inputs, 64)
    codes = torch.randint(-128, 128, (count, outputs, inputs * bits // 8), generator=generator, dtype=torch.int8)
    scales = torch.rand(count, inputs // group, outputs, generator=generator) / ((5 if bits == 4 else 70) * inputs**0.5)
    stored = codes.to(device).view(torch.int16) if bits == 4 else codes.to(device)
    return PackedMatrices(
        stored, scales.half().to(device), None, inputs, group, words, "integers", rounds=False, dtype=torch.bfloat16
    )
