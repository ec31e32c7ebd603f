"""`Build`: the arguments for making layers, passed down the model instead of globals and name prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from octavo.core.errors import ConfigError
from octavo.nn.attention.base import AttentionBackend, AttentionSpec, FusedBackend
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.sinks import HeadSinks
from octavo.nn.divided_norm import DividedRMSNorm
from octavo.nn.embedding import Embedding, TiedHead
from octavo.nn.experts import UP, ExpertLayer, experts_of_rank
from octavo.nn.experts_spec import ExpertsForm
from octavo.nn.latent.base import LatentBackend, LatentSpec
from octavo.nn.latent.layer import PagedLatents
from octavo.nn.linear import Linear
from octavo.nn.norm import LayerNorm, RMSNorm
from octavo.nn.quant.base import Part, Schemes
from octavo.nn.rope import Rope
from octavo.nn.rope_spec import RopeSpec
from octavo.nn.row_exchange import RowExchange
from octavo.nn.shard import AnyShard, Heads, share
from octavo.nn.weights import Keep, fused
from octavo.parallel.mesh import ALONE, Mesh

AnyBackend = AttentionBackend | LatentBackend
"""Of the attention layers of a model, which are all of one kind."""

_WIDE = 2048


@dataclass(frozen=True, slots=True)
class Build:
    """A place in the model under construction, and the settings of the whole model.

    Attributes:
        path: the place, in the checkpoint's names; "" is the root.
        schemes: chooses how linear layers store their weights.
        keep: stores the weights of embeddings.
        mesh: the ranks that compute the model together.
        whole_experts: each rank has some of a layer's experts, instead of a part of each.
        exchanges_rows: see `ExpertLayer`.
        exchange: of ranks that have the tokens of different requests in all layers; None if they have the same tokens,
            and divide each layer.
    """

    dtype: torch.dtype
    device: torch.device
    attention_backend: AnyBackend | None
    schemes: Schemes
    path: str = ""
    keep: Keep = fused
    mesh: Mesh = ALONE
    whole_experts: bool = False
    exchanges_rows: bool = False
    exchange: RowExchange | None = None

    def for_layers(self) -> Build:
        """Return the settings of the layers between embedding and head: whole ones, except for experts, if ranks
        have different tokens there."""
        return self if self.exchange is None else self.undivided()

    def residual_dtype(self, hidden_size: int) -> torch.dtype:
        """Return the dtype of the residual stream. Most of a bfloat16 model's rounding error arises in its sums, and
        changes the answers of small models. So it is float32, except for wide models on a GPU, which are less sensitive
        and whose norms would take half as long again."""
        wide = self.device.type != "cpu" and hidden_size > _WIDE
        return self.dtype if wide else torch.float32

    def at(self, *names: str | int) -> Build:
        """Return the same settings for a place further down: `b.at("layers", 3)` is at `path.layers.3`."""
        return replace(self, path=".".join(str(name) for name in (self.path, *names) if name != ""))

    def undivided(self) -> Build:
        """Return the same settings for layers that every rank computes whole."""
        return replace(self, mesh=ALONE)

    def linear(
        self,
        *names: str,
        inputs: int,
        outputs: int | Sequence[int],
        shard: AnyShard,
        bias: bool = False,
        gates: bool = False,
        activation: str = "silu",
        gather: bool = False,
    ) -> Linear:
        """Make one linear layer of the named parts.

        Args:
            outputs: each part's size, or one size for all parts.
            gates: the parts are a gate and its operand.
            activation: of the gate; see `nn/ops/activation.py`.
            gather: give every rank all outputs of a COL layer.
        """
        sizes = [outputs] * len(names) if isinstance(outputs, int) else outputs
        parts = [Part(name, inputs, size, bias) for name, size in zip(names, sizes, strict=True)]
        scheme = self.schemes.at(self.path, parts)
        form = {"gates": gates, "gather": gather}
        return Linear(self.path, self.device, parts, shard, scheme, self.mesh, **form, activation=activation)

    def experts(self, form: ExpertsForm) -> ExpertLayer:
        """Make the feed-forwards of a layer's experts.

        Args:
            form: of all ranks together.

        Raises:
            ConfigError: the experts can't be divided over the ranks.
        """
        part = Part(UP, form.hidden_size, form.size, form.bias)
        mesh = self.mesh if self.exchange is None else self.exchange.mesh
        mine = own_form(form, mesh, whole=self.whole_experts)
        scheme = self.schemes.at(self.path, [part]).experts(mine)
        place, exchange = (self.path, self.device), self.exchange
        sums_rows = self.exchanges_rows and exchange is None
        return ExpertLayer(*place, mine, form.size, scheme, mesh, exchanges_rows=sums_rows, exchange=exchange)

    def norm(self, name: str, size: int, eps: float, *, offset: float = 0.0, scaled: bool = True) -> RMSNorm:
        return RMSNorm(self.at(name).path, self.device, self.dtype, size, eps, offset=offset, scaled=scaled)

    def divided_norm(self, name: str, heads: Heads, part: int, eps: float) -> DividedRMSNorm:
        """Make a norm over all queries (part 0) or keys (part 1) of several ranks."""
        return DividedRMSNorm(self.at(name).path, self.device, self.dtype, heads, part, eps, self.mesh)

    def layer_norm(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        bias: bool = True,
        scaled: bool = True,
        offset: float = 0.0,
    ) -> LayerNorm:
        place = (self.at(name).path, self.device, self.dtype, size, eps)
        return LayerNorm(*place, bias=bias, scaled=scaled, offset=offset)

    def head_norm(self, name: str, heads: Heads, part: int, eps: float, *, bias: bool, offset: float) -> LayerNorm:
        """Make a norm with weights of its own for each head of queries (part 0) or keys (part 1)."""
        count, size = (heads.heads, heads.kv_heads)[part], heads.head_dim
        mine = heads.own(part, self.mesh)
        own = None if self.mesh.size == 1 else slice(mine.start // size, mine.stop // size)
        place = (self.at(name).path, self.device, self.dtype, size, eps)
        return LayerNorm(*place, bias=bias, offset=offset, heads=count, own=own)

    def embedding(self, name: str, rows: int, size: int, *, divided: bool = False, plain: bool = False) -> Embedding:
        """Make a table [rows, size].

        Args:
            divided: each rank keeps a part of the rows, if they can be divided.
            plain: dequantize it when it is loaded.
        """
        path = self.at(name).path
        scheme = self.schemes.at(path, [Part("", size, rows)])
        form = {"takes_blocks": not plain and scheme.takes_blocks, "takes_codes": scheme.takes_codes}
        mesh = self.mesh if divided else ALONE
        return Embedding(path, self.device, self.dtype, rows, size, **form, keep=self.keep, mesh=mesh)

    def tied_head(self, name: str, embedding: Embedding) -> TiedHead:
        path = self.at(name).path
        return TiedHead(path, embedding, self.schemes.at(path, [Part("", embedding.size, embedding.rows)]))

    def rope(self, spec: RopeSpec, *, rotates_first: bool = False) -> Rope:
        """
        Args:
            rotates_first: heads are normalized after their rotation, which fused kernels can't do.
        """
        return Rope(self.device, spec, still=rotates_first and isinstance(self.attention_backend, FusedBackend))

    def attention(self, spec: AttentionSpec) -> PagedAttention:
        backend = self._backend()
        assert not isinstance(backend, LatentBackend), "this model's backend is for latent attention"
        sinks = HeadSinks(self.at("sinks").path, self.device, spec.num_heads, self.mesh) if spec.sinks else None
        return PagedAttention(spec, backend, self.path, sinks)

    def latent_attention(self, spec: LatentSpec) -> PagedLatents:
        backend = self._backend()
        assert isinstance(backend, LatentBackend), "this model's backend is for keys and values"
        return PagedLatents(spec, backend, self.path)

    def _backend(self) -> AnyBackend:
        assert self.attention_backend is not None, "this model is built without a KV cache"
        return self.attention_backend


def own_form(form: ExpertsForm, mesh: Mesh, *, whole: bool) -> ExpertsForm:
    """Return a rank's part of the experts: a part of each, or some `whole` ones.

    Raises:
        ConfigError: the experts can't be divided over the ranks.
    """
    if whole and mesh.size > 1:
        return replace(form, own=_own_experts(form.num_experts, mesh))
    return replace(form, size=len(share(form.size, mesh)))


def _own_experts(count: int, mesh: Mesh) -> range:
    """Return a rank's experts of `count`: about an equal number for each. Raise ConfigError if some ranks had none."""
    if count < mesh.size:
        raise ConfigError(
            f"--enable-expert-parallel: {count} experts can't be divided over {mesh.size} ranks. Lower "
            "--tensor-parallel-size, or leave the flag out."
        )
    return experts_of_rank(count, mesh.rank, mesh.size)
