"""The one linear layer and the unquantized scheme, packed for the CPU and plain."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.build import Build
from octavo.nn.embedding import Embedding, TiedHead
from octavo.nn.linear import Linear
from octavo.nn.quant.base import Everywhere
from octavo.nn.quant.none import Unquantized
from octavo.nn.quant.onednn import OneDNN, packing_works
from octavo.nn.shard import COL, Heads
from octavo.nn.weights import TensorSpec

CPU = torch.device("cpu")


FORMS = {"packed": OneDNN, "plain": Unquantized}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """The second is what a machine without oneDNN does, and every GPU."""
    return request.param


def build(dtype: torch.dtype = torch.float32, form: str = "plain") -> Build:
    return Build(dtype, CPU, ReferenceAttention(), Everywhere(partial(FORMS[form], dtype, CPU)))


def qkv(bias: bool, form: str = "plain") -> tuple[Linear, list[Tensor]]:
    """A layer 24 -> 16 + 8 + 8 with random weights, and those, in the order in which it wants them."""
    heads = Heads(4, 2, 4)
    layer = (
        build(form=form)
        .at("model", "layers", 3)
        .linear("q_proj", "k_proj", "v_proj", inputs=24, outputs=heads.outputs, shard=heads, bias=bias)
    )
    tensors = [torch.randn(want.spec.shape) for want in layer.wanted()]
    layer.place(tensors)
    return layer, tensors


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
def test_parts_are_multiplied_side_by_side(form: str, bias: bool, rows: int) -> None:
    layer, tensors = qkv(bias, form)
    x = torch.randn(rows, 24)
    y = layer(x)
    assert y.is_contiguous()
    weights, biases = (tensors[0::2], tensors[1::2]) if bias else (tensors, [None] * 3)
    for part, weight, addend in zip(layer.split(y), weights, biases, strict=True):
        expected = x @ weight.T if addend is None else x @ weight.T + addend
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)


def test_strided_inputs(form: str) -> None:
    layer, tensors = qkv(False, form)
    x = torch.randn(5, 60)[:, 10:34]
    torch.testing.assert_close(layer.split(layer(x))[0], x @ tensors[0].T, rtol=1e-5, atol=1e-5)


def test_what_a_layer_wants() -> None:
    layer, _ = qkv(True)
    wanted = {want.name: want.spec for want in layer.wanted()}
    assert list(wanted)[:2] == ["model.layers.3.q_proj.weight", "model.layers.3.q_proj.bias"]
    assert wanted["model.layers.3.k_proj.weight"] == TensorSpec((8, 24), torch.float32, out_dim=0, in_dim=1)
    assert wanted["model.layers.3.k_proj.bias"] == TensorSpec((8,), torch.float32, out_dim=0)
    assert layer.shard == Heads(4, 2, 4)


def test_one_copy_of_the_weights(form: str) -> None:
    layer, tensors = qkv(True, form)
    assert layer.nbytes == sum(t.numel() for t in tensors) * 4


def test_the_layer_is_independent_of_the_tensors_it_was_given(form: str) -> None:
    """They may be views into a file that is about to be closed."""
    layer = build(form=form).at("m").linear("down", inputs=6, outputs=4, shard=COL, bias=True)
    weight, bias = torch.randn(4, 6), torch.randn(4)
    layer.place([weight, bias])
    x = torch.randn(2, 6)
    before = layer(x)
    weight.zero_()
    bias.zero_()
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_multiplies(dtype: torch.dtype) -> None:
    """Also one in which this CPU has no packed multiplication."""
    layer = build(dtype).at("m").linear("up", inputs=64, outputs=32, shard=COL)
    weight, x = torch.randn(32, 64, dtype=dtype), torch.randn(3, 64, dtype=dtype)
    layer.place([weight])
    y = layer(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-1)


def test_a_dtype_without_packing_is_found_out() -> None:
    assert not packing_works(torch.float64)


def test_a_tied_head_counts_its_memory_honestly(form: str) -> None:
    embedding = Embedding("model.embed_tokens", CPU, torch.float32, 10, 4)
    table = torch.randn(10, 4)
    embedding.place([table])
    head = TiedHead("lm_head", embedding, FORMS[form](torch.float32, CPU))
    head.place([])
    x = torch.randn(3, 4)
    torch.testing.assert_close(head(x), x @ table.T)
    assert torch.equal(embedding(torch.tensor([7, 2])), table[[7, 2]])
    assert embedding.nbytes == 160
    assert head.nbytes == (160 if form == "packed" else 0)


def test_paths() -> None:
    b = build()
    assert b.path == ""
    assert b.at("model").at("layers", 0, "mlp").path == "model.layers.0.mlp"
    assert b.norm("norm", 4, 1e-6).wanted()[0].name == "norm.weight"
    assert b.linear("lm_head", inputs=2, outputs=3, shard=COL).wanted()[0].name == "lm_head.weight"
