"""The instructions that find numbers in a table in registers, computed as the PTX ISA specifies them: no interpreter of
Triton's runs them, and they must find what a look-up in the table does."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

pytest.importorskip("triton")

from quantized_kit import codes_of

from octavo.nn.ops import triton_words
from octavo.nn.ops.tables import PLANES
from octavo.nn.quant.words import pack_codes

ONES = 0xFFFFFFFF


def permuted(first: int, second: int, selection: int) -> int:
    """prmt.b32, without a mode."""
    source = (first | second << 32).to_bytes(8, "little")
    places = [selection >> 4 * i & 15 for i in range(4)]
    chosen = [source[place & 7] if place < 8 else 255 * (source[place & 7] >> 7) for place in places]
    return int.from_bytes(bytes(chosen), "little")


def logical(a: int, b: int, c: int, table: int) -> int:
    """lop3.b32: bit i of the table is the result of the bits i of a, b and c."""
    found = 0
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found & ONES


OPERATIONS = {
    "prmt.b32": permuted,
    "lop3.b32": logical,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
}


def run(code: str, registers: dict[str, int]) -> None:
    """Compute the instructions, which all write their first operand."""
    for line in code.strip().splitlines():
        name, _, operands = line.strip().rstrip(";").partition(" ")
        target, *sources = re.findall(r"\{.*?\}|[^,\s]+", operands)
        if name == "mov.b64":
            low, high = re.findall(r"\w+", target)
            registers[low], registers[high] = registers[sources[0]] & ONES, registers[sources[0]] >> 32
        else:
            values = [registers[one] if one in registers else int(one, 0) for one in sources]
            registers[target] = OPERATIONS[name](*values)


def constants(source: str, field: int) -> list[int]:
    """The constant arguments of a field, by the kernel's own expressions."""
    lines = dict(re.findall(r"(PICK|SHIFT|UNMOVED): tl\.constexpr = (.*)", source))
    return [eval(lines[name], {"FIELD": field}) for name in ("PICK", "SHIFT", "UNMOVED")]


@pytest.mark.parametrize("dtype", PLANES, ids=str)
@pytest.mark.parametrize("field", range(4))
def test_selected_numbers_are_those_of_the_table(field: int, dtype: torch.dtype) -> None:
    source = inspect.getsource(triton_words.selected.fn)
    (code,) = re.findall(r'first, second;\n(.*?)\}"""', source, re.DOTALL)
    blocks = codes_of("table", 32, 16, 96)
    matrix = pack_codes([blocks], torch.device("cpu"))
    assert matrix is not None
    assert matrix.book is not None
    assert blocks.book is not None
    planes = [plane % (1 << 64) for plane in matrix.book[PLANES.index(dtype)].tolist()]
    expected = blocks.book.numbers.to(dtype).view(torch.int16).tolist()
    for words in torch.randint(0, 1 << 16, (64, 4)).tolist():
        places = range(4, 32, 4)  # of the arguments after the words, each for four elements
        given = zip(places, (*constants(source, field), *planes), strict=True)
        registers = {f"${place}": value for place, value in given}
        registers |= {"$2": words[0] | words[1] << 16, "$3": words[2] | words[3] << 16}
        run(code, registers)
        results = registers["$0"], registers["$1"]
        found = [result >> shift & 0xFFFF for result in results for shift in (0, 16)]
        assert found == [expected[word >> 4 * field & 15] & 0xFFFF for word in words]
