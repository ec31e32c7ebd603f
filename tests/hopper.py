"""Compile the launches of packed experts, or of codes in words, for a Hopper GPU, without one: `python tests/hopper.py
FORM`.

Prints a line of JSON for each variant of a kernel: its name, the number of tokens, and what ptxas says of registers,
spills and shared memory. `FakeTensorMode` makes tensors on a GPU that hold nothing, so the host's code chooses tilings
and launches as it would there.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.device.compiler import NoDriver
from octavo.nn.experts_spec import ClampedGate, ExpertsForm, RoutingSpec
from octavo.nn.ops import expert_rows, packed_expert_rows, packed_expert_tiles, words
from octavo.nn.ops.expert_products import mix_stacked, route_on_device
from octavo.nn.ops.expert_weights import Kind, PackedMatrices, StackedWeights
from octavo.nn.ops.packed import FEW_WORDS
from octavo.nn.ops.words import Words

BITS16, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, INT8, WORDS = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int16


class Form(NamedTuple):
    """How numbers are stored; see `PackedMatrices`. A group of 0 has all inputs."""

    codes: torch.dtype
    group: int
    words: int
    scales: torch.dtype
    minima: bool = False
    kind: Kind = "integers"
    rounds: bool = False


FORMS = {
    "E4M3": Form(E4M3, 0, 128, WIDE, rounds=True),
    "E4M3 in tiles": Form(E4M3, 128, 128, WIDE, rounds=True),
    "MXFP8": Form(E4M3, 32, 32, WIDE),
    "E5M2": Form(E5M2, 0, 128, WIDE),
    "W8A8": Form(INT8, 0, 128, WIDE, rounds=True),
    "W8A16": Form(INT8, 0, 128, HALF),
    "8 bits, groups of 32 with minima": Form(INT8, 32, 32, HALF, minima=True),
    "4 bits": Form(WORDS, 0, 64, HALF),
    "4 bits, groups of 128": Form(WORDS, 128, 64, HALF),
    "4 bits, groups of 128 with minima": Form(WORDS, 128, 64, HALF, minima=True),
    "4 bits, groups of 32 with minima": Form(WORDS, 32, 32, HALF, minima=True),
    "NVFP4": Form(WORDS, 16, 16, HALF, kind="e2m1"),
    "MXFP4": Form(WORDS, 32, 32, BITS16, kind="e2m1"),
    "NF4": Form(WORDS, 64, 32, HALF, kind="table"),
    "NF4, groups of 128": Form(WORDS, 128, 32, HALF, kind="table"),
    "NF4, whole rows": Form(WORDS, 0, 32, HALF, kind="table"),
}


class Codes(NamedTuple):
    """How the codes of a layer are stored; see `Words`. A group of 0 has all inputs."""

    kind: Literal["table", "e4m3", "e5m2"]
    group: int
    width: int
    inputs: int
    scales: torch.dtype


CODES = {
    "codes in a table, groups of 64": Codes("table", 64, 64, 4096, HALF),
    "codes in a table, filled up": Codes("table", 64, 16, 2880, HALF),
    "E4M3 in words, groups of 32": Codes("e4m3", 32, 32, 4096, BITS16),
    "E5M2 in words, whole rows": Codes("e5m2", 0, 64, 4096, WIDE),
}


class Shape(NamedTuple):
    experts: int
    hidden: int
    size: int
    top_k: int
    clamped: bool


QWEN3, GPT_OSS = Shape(128, 2048, 768, 8, clamped=False), Shape(32, 2880, 2880, 4, clamped=True)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def matrices(form: Form, count: int, outputs: int, inputs: int) -> PackedMatrices:
    group = form.group or inputs
    length = -(-inputs // (4 * form.words)) * form.words if form.codes == WORDS else inputs
    scales = empty(count, inputs // group, outputs, dtype=form.scales)
    codes, minima = empty(count, outputs, length, dtype=form.codes), scales if form.minima else None
    book = empty(3, 4, dtype=torch.int64) if form.kind == "table" else None
    return PackedMatrices(codes, scales, minima, inputs, group, form.words, form.kind, form.rounds, BITS16, book)


def launch(form: Form, shape: Shape, tokens: int) -> None:
    """Route tokens, and sum their experts; of one token also with its norm and residual sum."""
    count, hidden, size, top_k, clamped = shape
    gate = ClampedGate(1.702, 7.0) if clamped else None
    experts = ExpertsForm(num_experts=count, hidden_size=hidden, size=size, clamped=gate, bias=clamped)
    biases = (empty(count, 2 * size, dtype=BITS16), empty(count, hidden, dtype=BITS16)) if clamped else (None, None)
    first, second = matrices(form, count, 2 * size, hidden), matrices(form, count, hidden, size)
    stacked = StackedWeights(first, second, *biases)
    routing = route_on_device(empty(tokens, count, dtype=BITS16), RoutingSpec(top_k=top_k, normalized=True))
    if tokens == 1:
        stream, norm = empty(1, hidden, dtype=WIDE), (empty(hidden, dtype=BITS16), 1e-5)
        inner = expert_rows.gate_rows(stream, norm, routing, stacked, experts)
        expert_rows.add_rows(inner, routing, stacked, experts, stream)
    mix_stacked(empty(tokens, hidden, dtype=BITS16), routing, stacked, experts)


def launch_words(form: Codes, rows: int) -> None:
    """Multiply rows, or expand the matrix."""
    bits, outputs, inputs = 4 if form.kind == "table" else 8, 4096, form.inputs
    blocks, group = -(-inputs // (form.width * 16 // bits)), form.group or inputs
    codes, scales = empty(outputs, blocks, form.width, dtype=WORDS), empty(outputs, inputs // group, dtype=form.scales)
    book = empty(3, 4, dtype=torch.int64) if form.kind == "table" else None
    matrix = Words(codes, scales, None, None, outputs, inputs, bits, group, form.kind, book)
    x = empty(rows, inputs, dtype=BITS16)
    if rows > FEW_WORDS:
        words.widen(matrix, empty(outputs, inputs, dtype=BITS16))
    else:
        words.rows_product(x, matrix, words.rows_plan(matrix, x), WIDE)


def variants(launches: dict[int, Callable[[], None]]) -> dict[Any, tuple[int, Any, list[Any], dict[str, Any]]]:
    """Return the launches, by number of tokens, that differ in more than sizes: number of tokens, kernel, arguments,
    options."""
    found: dict[Any, tuple[int, Any, list[Any], dict[str, Any]]] = {}

    def collect(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        stand_ins = [_stand_in(arg) for arg in args]
        key = (kernel.__name__, *map(_kind, stand_ins), *((name, str(value)) for name, value in options.items()))
        found.setdefault(key, (tokens, kernel, stand_ins, options))

    with FakeTensorMode(), mock.patch.object(JITFunction, "run", collect):
        for tokens in launches:
            launches[tokens]()
    return found


def launches_of(name: str) -> dict[int, Callable[[], None]]:
    """Return launches of a form for numbers of tokens that have kernels of their own."""
    if name in CODES:
        return {rows: partial(launch_words, CODES[name], rows) for rows in (1, 32, 64, FEW_WORDS, FEW_WORDS + 1)}
    form = FORMS[name]
    shape = GPT_OSS if form.kind == "e2m1" else QWEN3
    means = (17, 30, 60)  # an expert's rows, for each height of tiles
    counts = (1, 2, 16, 17, *(mean * shape.experts // shape.top_k for mean in means))
    return {tokens: partial(launch, form, shape, tokens) for tokens in counts}


def _stand_in(value: Any) -> Any:
    if isinstance(value, Tensor):
        return MockTensor(value.dtype)
    if isinstance(value, TensorDescriptor):
        return TensorDescriptor(MockTensor(value.base.dtype), value.shape, value.strides, value.block_shape)
    return value


def _kind(value: Any) -> Any:
    if isinstance(value, MockTensor):
        return value.dtype
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape)
    return (value == 1, value % 16 == 0) if isinstance(value, int) else value


def resources(compiled: Any) -> dict[str, int]:
    """Return what ptxas says of a kernel, and its shared memory, in bytes but for registers."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", told)
    ((stores, loads),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
    return {
        "registers": int(registers),
        "spilled": max(int(stores), int(loads)),
        "shared": int(compiled.metadata.shared),
        "threads": 32 * int(compiled.metadata.num_warps),
    }


def main() -> None:
    driver.set_active(NoDriver(GPUTarget("cuda", 90, 32)))
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    CompiledKernel._init_handles = lambda self: None  # there is no GPU to load it
    for module in (packed_expert_rows, packed_expert_tiles):
        module.usable = lambda device: False  # else few of these kernels would be launched
    for tokens, kernel, args, options in variants(launches_of(sys.argv[1])).values():
        compiled = kernel.run(*args, grid=(1,), warmup=True, **options)
        print(json.dumps({"kernel": kernel.__name__, "tokens": tokens, **resources(compiled)}), flush=True)


if __name__ == "__main__":
    main()
