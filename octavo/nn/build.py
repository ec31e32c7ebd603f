"""`Build`: what layers need to be made, handed down the model instead of globals and name prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from octavo.nn.attention.base import AttentionBackend, AttentionSpec
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.embedding import Embedding, TiedHead
from octavo.nn.linear import Linear
from octavo.nn.norm import LayerNorm, RMSNorm
from octavo.nn.quant.base import Part, Schemes
from octavo.nn.rope import Rope
from octavo.nn.rope_spec import RopeSpec
from octavo.nn.shard import Heads, Shard
from octavo.nn.weights import Keep, fused
from octavo.parallel.mesh import ALONE, Mesh

_WIDE = 2048


@dataclass(frozen=True, slots=True)
class Build:
    """A place in the model under construction, and the choices that hold everywhere in it.

    Attributes:
        path: the place, in the checkpoint's vocabulary; "" is the root.
        schemes: how linear layers keep their weights.
        keep: where embeddings keep theirs.
        mesh: the ranks that compute the model together.
    """

    dtype: torch.dtype
    device: torch.device
    attention_backend: AttentionBackend | None
    schemes: Schemes
    path: str = ""
    keep: Keep = fused
    mesh: Mesh = ALONE

    def residual_dtype(self, hidden_size: int) -> torch.dtype:
        """What the residual stream is kept in. Most of the rounding error of a bfloat16 model is made in its sums, and
        small models change their answers by it. So it is float32, but on a GPU for wide models, which stand it better
        and whose norms it would slow by half."""
        wide = self.device.type != "cpu" and hidden_size > _WIDE
        return self.dtype if wide else torch.float32

    def at(self, *names: str | int) -> Build:
        """The same choices further down: `b.at("layers", 3)` stands at `path.layers.3`."""
        return replace(self, path=".".join(str(name) for name in (self.path, *names) if name != ""))

    def linear(
        self,
        *names: str,
        inputs: int,
        outputs: int | Sequence[int],
        shard: Shard | Heads,
        bias: bool = False,
        gates: bool = False,
        gather: bool = False,
    ) -> Linear:
        """One linear layer of the named parts. `outputs` is each part's size, or one for all of them.

        `gates` marks a gate and what it gates, side by side; `gather` gives every rank all outputs of a COL layer.
        """
        sizes = [outputs] * len(names) if isinstance(outputs, int) else outputs
        parts = [Part(name, inputs, size, bias) for name, size in zip(names, sizes, strict=True)]
        scheme = self.schemes.at(self.path, parts)
        return Linear(self.path, self.device, parts, shard, scheme, self.mesh, gates=gates, gather=gather)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.at(name).path, self.device, self.dtype, size, eps)

    def layer_norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        return LayerNorm(self.at(name).path, self.device, self.dtype, size, eps, bias=bias)

    def embedding(self, name: str, rows: int, size: int) -> Embedding:
        path = self.at(name).path
        takes_blocks = self.schemes.at(path, [Part("", size, rows)]).takes_blocks
        return Embedding(path, self.device, self.dtype, rows, size, takes_blocks=takes_blocks, keep=self.keep)

    def tied_head(self, name: str, embedding: Embedding) -> TiedHead:
        path = self.at(name).path
        return TiedHead(path, embedding, self.schemes.at(path, [Part("", embedding.size, embedding.rows)]))

    def rope(self, spec: RopeSpec) -> Rope:
        return Rope(self.device, spec)

    def attention(self, spec: AttentionSpec) -> PagedAttention:
        assert self.attention_backend is not None, "this model was to have no KV cache"
        return PagedAttention(spec, self.attention_backend, self.path)
