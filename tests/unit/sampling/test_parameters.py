"""The table of parameters is what all samplers read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

import octavo.native
from octavo.core.params import SamplingParams
from octavo.native.build import compilers
from octavo.sampling.parameters import NUM_PARAMS, OFFSETS, PARAMETERS, STRUCT, packed, packed_words
from octavo.sampling.state import PreparedParams


def prepared() -> PreparedParams:
    params = SamplingParams(temperature=0.75, top_k=9, top_p=0.5, min_p=0.25, repetition_penalty=1.5, min_tokens=3)
    return PreparedParams.make(params, 2**63 + 5, [7], 100)


def test_the_structure_is_that_of_the_kernels(tmp_path: Path) -> None:
    found = compilers()
    if not found:
        pytest.skip("no C++ compiler on this machine")
    fields = "".join(f'std::printf("%zu ", offsetof(OctavoSampling, {name}));' for name in STRUCT.names or ())
    source = f'#include <cstddef>\n#include <cstdio>\n#include "sample.h"\nint main() {{ {fields}'
    source += ' std::printf("%zu", sizeof(OctavoSampling)); }'
    (tmp_path / "offsets.cpp").write_text(source)
    folder = Path(octavo.native.__file__).parent / "src"
    program = tmp_path / "offsets"
    subprocess.run([found[0], "-std=c++17", f"-I{folder}", tmp_path / "offsets.cpp", "-o", program], check=True)
    found = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    assert STRUCT.fields is not None
    offsets = [STRUCT.fields[one.name][1] for one in PARAMETERS]
    assert [int(number) for number in found] == [*offsets, STRUCT.itemsize]


def test_every_field_of_the_structure_is_in_the_table() -> None:
    """Also those at its end, which no offset would betray."""
    header = (Path(octavo.native.__file__).parent / "src" / "sample.h").read_text()
    body = header.split("struct OctavoSampling {")[1].split("};")[0]
    lines = (line.split("//")[0] for line in body.splitlines())
    declared = [part.split()[-1].lstrip("*") for line in lines for part in line.strip(" ;").split(",") if part.strip()]
    assert declared == [one.name for one in PARAMETERS]


def test_words_of_a_device() -> None:
    words = packed_words(prepared(), 11)
    assert len(words) == NUM_PARAMS == 1 << (NUM_PARAMS.bit_length() - 1)
    reals = {name: float(words[at : at + 1].view(np.float32)[0]) for name, at in OFFSETS.items()}
    assert {name: reals[name] for name in ("temperature", "top_p", "min_p", "repetition", "frequency")} == {
        "temperature": 0.75,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition": 1.5,
        "frequency": 0.0,
    }
    assert int(words[OFFSETS["seed"] :][:2].copy().view(np.uint64)[0]) == 2**63 + 5
    assert (words[OFFSETS["top_k"]], words[OFFSETS["num_prompt"]]) == (9, 11)


def test_a_row_of_the_structure() -> None:
    params = prepared()
    row = np.zeros(1, dtype=STRUCT)
    row[0] = packed(params, 11)
    values = {name: row[0][name].item() for name in STRUCT.names or ()}
    assert values["banned_ids"] == params.banned_ids.data_ptr()
    assert values | {"banned_ids": 0, "bias_ids": 0, "bias_values": 0, "bad_words": 0} == {
        "temperature": 0.75,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition": 1.5,
        "frequency": 0.0,
        "presence": 0.0,
        "seed": 2**63 + 5,
        "banned_ids": 0,
        "bias_ids": 0,
        "bias_values": 0,
        "allowed": 0,
        "bad_words": 0,
        "top_k": 9,
        "num_prompt": 11,
        "min_tokens": 3,
        "num_banned": 1,
        "num_bias": 0,
        "bad_words_size": 0,
        "changes": 1,
    }
