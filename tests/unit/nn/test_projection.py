"""What a projection does around its product, and when it leaves that to the scheme."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.build import Build
from octavo.nn.delta import Addition, Delta
from octavo.nn.linear import Linear
from octavo.nn.norm import RMSNorm
from octavo.nn.quant.base import Everywhere, Part, Scheme
from octavo.nn.quant.none import Unquantized
from octavo.nn.shard import COL, ROW
from octavo.nn.stream import Stream
from octavo.parallel.mesh import Mesh

CPU = torch.device("cpu")
SIZE = 16


class FusingScheme(Unquantized):
    """Does in plain torch what a GPU's scheme does in one launch, and notes what it was asked for."""

    fused_rows = 1

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> None:
        super().__init__(dtype, device)
        self.calls: list[str] = []
        self.in_parts = False

    def fused(
        self,
        x: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        gated: bool = False,
        add_to: Tensor | None = None,
        dtype: torch.dtype | None = None,
        delta: Delta | None = None,
    ) -> Tensor:
        self.calls.append("fused" if delta is None else "fused with a delta")
        x = x if norm is None else torch.nn.functional.rms_norm(x, (x.shape[1],), *norm)
        y = self.apply(x)
        if delta is not None:
            delta.begin(x).add_to(y)
        if gated:
            gate, up = y.chunk(2, dim=-1)
            y = torch.nn.functional.silu(gate) * up
        return y if add_to is None else add_to.add_(y)

    def gated(self, x: Tensor, addition: Addition | None = None) -> Tensor:
        self.calls.append("gated" if addition is None else "gated with a delta")
        if addition is not None:
            return addition.gated(self.apply(x))
        gate, up = self.apply(x).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def leave(self, stream: Tensor, x: Tensor) -> Tensor | None:
        self.calls.append("leave")
        if self.in_parts:
            half = x.shape[1] // 2
            assert self.weight is not None
            return torch.stack([x[:, :half] @ self.weight[:, :half].T, x[:, half:] @ self.weight[:, half:].T])
        stream.add_(self.apply(x))
        return None


def layer(scheme: Scheme, *, outputs: int = SIZE, bias: bool = False, gates: bool = False) -> Linear:
    names = ("gate", "up") if gates else ("out",)
    build = Build(torch.float32, CPU, ReferenceAttention(), Everywhere(lambda: scheme))
    made = build.linear(*names, inputs=SIZE, outputs=outputs, shard=COL if gates else ROW, bias=bias, gates=gates)
    made.place([torch.randn(want.spec.shape) for want in made.wanted()])
    return made


def norm() -> RMSNorm:
    made = RMSNorm("norm", CPU, torch.float32, SIZE, 1e-5)
    made.place([torch.randn(SIZE)])
    return made


def block(scheme_of: type[Unquantized], x: Tensor, *, bias: bool, in_parts: bool = False) -> tuple[Tensor, list[str]]:
    """x plus a gated feed-forward of norm(x), twice; and what the schemes were asked for."""
    torch.manual_seed(5)
    up, down, before = scheme_of(torch.float32, CPU), scheme_of(torch.float32, CPU), norm()
    gate_up, out = layer(up, bias=bias, gates=True), layer(down, bias=bias)
    for scheme in (up, down):
        if isinstance(scheme, FusingScheme):
            scheme.in_parts = in_parts
    stream = Stream(x)
    for _ in range(2):
        out.into(stream, gate_up.after_norm(stream, before, gated=True))
    calls = [call for scheme in (up, down) for call in getattr(scheme, "calls", [])]
    return stream.total(), calls


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_blocks_add_what_plain_ones_add(
    rows: int, bias: bool, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after(self: RMSNorm, parts: Tensor | None, stream: Tensor) -> Tensor:
        return self(stream if parts is None else stream.add_(parts.sum(0)))

    monkeypatch.setattr(RMSNorm, "after", after)  # a Triton kernel otherwise
    x = torch.randn(rows, SIZE)
    kept = x.clone()
    expected, _ = block(Unquantized, x, bias=bias)
    result, calls = block(FusingScheme, x, bias=bias, in_parts=in_parts)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(x, kept), "the caller's stream was changed"
    assert ("fused" in calls) == (rows == 1)
    assert ("leave" in calls) == (rows != 1 and not bias)


def test_the_stream_goes_on_with_chosen_rows_whatever_is_still_to_be_added() -> None:
    x, output, rows = torch.randn(4, SIZE), torch.randn(4, SIZE), torch.tensor([2, 0])
    stream = Stream(x)
    stream.add_later(output.clone())
    stream.choose(rows)
    torch.testing.assert_close(stream.total(), (x + output)[rows])
    stream = Stream(x)
    stream.add_parts_later(output.clone()[None].expand(2, -1, -1))
    stream.choose(rows)
    torch.testing.assert_close(stream.total(), (x + 2 * output)[rows])


class Matrix(Delta):
    """Adds the product with another matrix."""

    def __init__(self, outputs: int, fused_rows: int) -> None:
        self.matrix = torch.randn(SIZE, outputs)
        self.fused_rows = fused_rows

    def begin(self, x: Tensor) -> Addition:
        return Product(x @ self.matrix)


class Product(Addition):
    def __init__(self, value: Tensor) -> None:
        self._value = value

    def add_to(self, y: Tensor) -> None:
        y.add_(self._value)


def test_a_delta_is_added_to_every_product() -> None:
    out, x = layer(FusingScheme()), torch.randn(1, SIZE)
    plain, wide = out(x), out.wide(x)
    delta = out.delta = Matrix(SIZE, 0)
    torch.testing.assert_close(out(x), plain + x @ delta.matrix)
    torch.testing.assert_close(out.wide(x), wide + x @ delta.matrix)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("fused_rows", [0, 1])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_delta_leaves_fused_what_it_supports(
    rows: int, fused_rows: int, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of two layers with deltas adds what one with changed weights adds."""

    def after(self: RMSNorm, parts: Tensor | None, stream: Tensor) -> Tensor:
        return self(stream if parts is None else stream.add_(parts.sum(0)))

    monkeypatch.setattr(RMSNorm, "after", after)  # a Triton kernel otherwise
    up, down, before = FusingScheme(), FusingScheme(), norm()
    gate_up, out = layer(up, gates=True), layer(down)
    down.in_parts = in_parts
    x = torch.randn(rows, SIZE)
    deltas = Matrix(2 * SIZE, fused_rows), Matrix(SIZE, fused_rows)
    gate_up.delta, out.delta = deltas
    stream = Stream(x)
    for _ in range(2):
        out.into(stream, gate_up.after_norm(stream, before, gated=True))
    result, calls = stream.total(), up.calls + down.calls
    assert ("fused with a delta" in calls) == (rows == 1 == fused_rows)
    assert ("leave" in calls) == (not (rows == 1 == fused_rows))
    assert ("gated with a delta" in calls) == (not (rows == 1 == fused_rows))
    assert "gated" not in calls

    gate_up.delta = out.delta = None
    for scheme, delta in zip((up, down), deltas, strict=True):
        assert scheme.weight is not None
        scheme.weight += delta.matrix.T
    expected = Stream(x)
    for _ in range(2):
        out.into(expected, gate_up.after_norm(expected, before, gated=True))
    torch.testing.assert_close(result, expected.total(), rtol=1e-4, atol=1e-3)


def test_nothing_is_fused_where_ranks_must_add_up() -> None:
    scheme = FusingScheme()
    row = Linear("mlp", CPU, [Part("down_proj", SIZE, SIZE)], ROW, scheme, Mesh(0, 2))
    column = Linear("mlp", CPU, [Part("up_proj", SIZE, SIZE)], COL, scheme, Mesh(0, 2))
    assert not row.leaves(torch.float32)
    assert column.leaves(torch.float32)


def test_a_scheme_is_chosen_for_each_layer() -> None:
    class ByPath:
        def at(self, path: str, parts: Sequence[Part]) -> Scheme:
            return FusingScheme() if path.endswith("mlp") and parts[0].name == "up" else Unquantized(torch.float32, CPU)

    build = Build(torch.float32, CPU, ReferenceAttention(), ByPath()).at("layers", 0)
    sizes = {"inputs": SIZE, "outputs": SIZE, "shard": COL}
    assert isinstance(build.at("mlp").linear("up", **sizes).scheme, FusingScheme)
    assert type(build.at("mlp").linear("down", **sizes).scheme) is Unquantized
    assert type(build.at("self_attn").linear("up", **sizes).scheme) is Unquantized
