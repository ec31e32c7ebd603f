"""Which of the kernels' libraries a model needs is told by its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from octavo.hub.files import ModelFiles
from octavo.hub.gguf_file import GGUFTensor
from octavo.models.load.gguf_blocks import SUPPORTED, as_blocks
from octavo.native import needs
from octavo.native.isa import LEVELS
from octavo.native.needs import CODE_KINDS, INTEGER_KINDS, needed_libraries


@pytest.fixture
def files(monkeypatch):
    """Makes a GGUF file of matrices of some kinds, with a norm beside them."""

    def make(*kinds: Kind) -> ModelFiles:
        tensors = {"norm": GGUFTensor("norm", (32,), Kind.F32, 0, 128)}
        for kind in kinds:
            tensors[kind.name] = GGUFTensor(kind.name, (32, 256), kind, 0, 1)
        head = type("Head", (), {"tensors": tensors})
        monkeypatch.setattr(needs, "read_gguf", lambda path: head)
        return ModelFiles(name="m", path=Path("m.gguf"), format="gguf", weights=(), config={})

    return make


def test_a_file_of_integers_needs_no_products_of_floats(files):
    assert needed_libraries(files(Kind.Q4_1, Kind.Q8_0), "auto", "auto", "auto", "int16") == ["blocks"]


def test_formats_that_are_codes_or_floats_need_their_products(files):
    assert needed_libraries(files(Kind.Q4_K, Kind.Q6_K), "auto", "auto", "auto", "int16") == ["blocks", "codes"]
    assert needed_libraries(files(Kind.IQ4_NL, Kind.F32), "auto", "auto", "auto", "int16") == ["codes", "words"]


@pytest.mark.parametrize(("isa", "needed"), [("avx2", "codes"), ("avx512_bf16", "words")])
def test_weights_of_16_bits_are_codes_where_nothing_multiplies_bfloat16(files, isa, needed, monkeypatch):
    monkeypatch.setattr(needs, "usable", lambda: [next(level for level in LEVELS if level.name == isa)])
    assert needed_libraries(files(Kind.BF16), "auto", "auto", "auto", "int16") == [needed]
    folder = ModelFiles(name="m", path=Path("m"), format="safetensors", weights=(), config={"dtype": "bfloat16"})
    assert needed_libraries(folder, "auto", "auto", "auto", "int16") == list(dict.fromkeys([needed, "words"]))


def test_integers_that_meet_bfloat16_are_multiplied_as_bfloat16(files):
    assert needed_libraries(files(Kind.Q4_1, Kind.Q6_K), "auto", "auto", "auto", "bfloat16") == ["words"]


@pytest.mark.parametrize(("dtype", "load_format"), [("float32", "auto"), ("auto", "dummy")])
def test_integers_that_become_floats_are_floats(files, dtype, load_format):
    assert needed_libraries(files(Kind.Q4_1), dtype, load_format, "auto", "int16") == ["words"]


def test_a_cache_of_integers_needs_its_attention():
    folder = ModelFiles(name="m", path=Path("m"), format="safetensors", weights=(), config={})
    assert needed_libraries(folder, "auto", "auto", "int8_per_token_head", "int16") == ["attention_int8", "words"]


@pytest.mark.parametrize(("count", "needed"), [(8, ["experts", "words"]), (1, ["words"])])
def test_experts_have_a_library_of_their_own(count, needed):
    config = {"num_local_experts": count}
    folder = ModelFiles(name="m", path=Path("m"), format="safetensors", weights=(), config=config)
    assert needed_libraries(folder, "auto", "auto", "auto", "int16") == needed


def test_latent_attention_has_a_library_of_its_own():
    config = {"qk_rope_head_dim": 64}
    folder = ModelFiles(name="m", path=Path("m"), format="safetensors", weights=(), config=config)
    assert needed_libraries(folder, "auto", "auto", "auto", "int16") == ["latent", "words"]


def test_recurrent_layers_have_a_library_of_their_own():
    config = {"conv_L_cache": 3}
    folder = ModelFiles(name="m", path=Path("m"), format="safetensors", weights=(), config=config)
    assert needed_libraries(folder, "auto", "auto", "auto", "int16") == ["recurrent", "words"]


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda kind: kind.name)
def test_the_kinds_that_stay_integers_are_those_that_the_loader_keeps(kind):
    row = torch.zeros(1, GGML_QUANT_SIZES[kind][1], dtype=torch.uint8)
    blocks = as_blocks(row, kind)
    assert (blocks is not None) == (kind in INTEGER_KINDS | CODE_KINDS)
    assert blocks is None or (blocks.book is not None) == (kind in CODE_KINDS)
