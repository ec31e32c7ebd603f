"""Heads of decoder layers that draft from the target's hidden states, as models for a `Runner`.

A head's sequence is the target's without the first token: position p pairs the target's state at p with the token at
p + 1, and predicts the token at p + 2. Its logits are over the target's vocabulary, with minus infinity for tokens that
it can't draw.

- EAGLE (https://arxiv.org/abs/2401.15077): x = fc([embedding, state]), through decoder layers, the first of them
  without a norm of its input; the output stands for the target's next state (after the final norm), so it goes to the
  target's head as it is.
- EAGLE-3 (https://arxiv.org/abs/2503.01840): state = fc([states of three layers]), in some heads of their norm; one
  layer attends over [norm(embedding), norm(state)] and adds to the state, in some heads to its norm; an own norm and
  head, often over fewer tokens.
- Multi-token prediction (https://arxiv.org/abs/2412.19437, section 2.2): x = eh_proj([norm(embedding), norm(state)]),
  through one layer like the target's last, with a norm of its own before the target's head; `forms.py` has variants.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor, nn

from octavo.core.errors import ConfigError
from octavo.features.speculation.heads.spec import ANOTHER, HeadSpec
from octavo.models.decoder import CausalLM, DecoderLayer, emit_layers
from octavo.models.feed_forwards.table import make_feed_forward
from octavo.models.mixers.attention import Attention
from octavo.models.norms import make_norm
from octavo.models.spec import PRE
from octavo.native.bindings import Dtype
from octavo.native.builder import LOGITS, RESIDUAL, ProgramBuilder
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.build import Build
from octavo.nn.embedding import Embedding, TiedHead
from octavo.nn.experts import ExpertLayer
from octavo.nn.latent.layer import PagedLatents
from octavo.nn.linear import Linear, Projection
from octavo.nn.norm import NoNorm, Norm
from octavo.nn.quant.panels import PANEL
from octavo.nn.rope import Rope
from octavo.nn.shard import COL, NONE, ROW, Heads
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream
from octavo.nn.weights import Stored, TensorSpec, Wanted, WeightLayer, plain, tensor_bytes


class DraftTokens(WeightLayer):
    """The target's id of each token that a head can draw: `d2t` of checkpoints has the differences."""

    def __init__(self, device: torch.device, count: int, vocab_size: int) -> None:
        super().__init__("", device)
        self._count, self._vocab_size = count, vocab_size
        self.ids = torch.empty(0, dtype=torch.int64)
        self._places = torch.empty(0, dtype=torch.int32)

    def wanted(self) -> list[Wanted]:
        return [Wanted("d2t", TensorSpec((self._count,), torch.int64))]

    def place(self, tensors: Sequence[Stored | None]) -> None:
        self.ids = plain(tensors[0]) + torch.arange(self._count, device=self.device)
        least, most = (int(one) for one in self.ids.aminmax())
        if not 0 <= least <= most < self._vocab_size:
            raise ConfigError(
                f"speculative_config: d2t of the head names tokens {least} to {most}, and the model has "
                f"{self._vocab_size}. {ANOTHER}"
            )

    def pack(self) -> None:
        """Convert the ids to the form that the CPU kernels read, for `emit`."""
        self._places = self.ids.int()

    def emit(self, b: ProgramBuilder, source: int) -> None:
        """Add to a native program: put logits of the draft vocabulary in their places among those of all tokens."""
        b.copy(source, LOGITS, self._count, places=self._places.data_ptr())

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.ids, self._places)


class HeadModel(nn.Module):
    """What the kinds of heads share.

    Attributes:
        given: [tokens, hidden_size], the state beside each token of a step; set before the step, at fixed addresses.
        layer_range: its layers among those of `HeadSpec`.
        is_last: it ends with logits.
        layers: like those of the target.
    """

    layer_range: range
    is_last = True

    def __init__(self, b: Build, spec: HeadSpec, target: CausalLM | None, tables: Set[str]) -> None:
        """
        Args:
            target: gives its embedding and its head; None if the head has copies of them.
            tables: which of these two the head has itself, by their tensors.
        """
        super().__init__()
        self.spec = spec
        self.residual_dtype = b.residual_dtype(spec.hidden_size)
        self.given = torch.empty(0)
        self.layers = nn.ModuleList()
        self._dtype = b.dtype
        self._target = [] if target is None else [target]  # in a list, so that the loader does not walk it
        shares = target is not None and target.spec.hidden_size == spec.hidden_size
        self.embedding = (
            None
            if shares and "embed_tokens.weight" not in tables
            else b.embedding("embed_tokens", spec.vocab_size, spec.hidden_size, plain=True)
        )
        rows = spec.draft_vocab or spec.vocab_size
        shard = NONE if rows % b.mesh.size else COL
        self.head = (
            None
            if shares and "lm_head.weight" not in tables and not spec.draft_vocab and spec.kind != "eagle3"
            else b.linear("lm_head", inputs=spec.hidden_size, outputs=rows, shard=shard, gather=True)
        )
        self.draft_tokens = DraftTokens(b.device, spec.draft_vocab, spec.vocab_size) if spec.draft_vocab else None

    def finish(self) -> None:
        """Collect the layers that keep keys and values."""
        self.layer_range = range(self.spec.num_layers)
        self.attention_layers = [m for m in self.modules() if isinstance(m, PagedAttention)]
        self.cached_layers = [m for m in self.modules() if isinstance(m, PagedAttention | PagedLatents)]
        self.recordable = all(getattr(m, "recordable", True) for m in self.modules() if m is not self)

    def reserve(self, tokens: int, device: torch.device) -> None:
        """Allocate `given` for steps of up to this many tokens, padding included."""
        self.given = torch.zeros(tokens, self.spec.hidden_size, dtype=self.residual_dtype, device=device)

    @property
    def entry(self) -> Tensor:
        return self.given

    def pack(self) -> None:
        """See `CausalLM.pack`."""
        assert self.embedding is not None, "a packed target shares no tables"
        assert self.head is not None
        for layer in self.modules():
            if isinstance(layer, Projection | ExpertLayer | Norm | Embedding | DraftTokens):
                layer.pack()

    def emit(self, b: ProgramBuilder) -> None:
        """See `CausalLM.emit`. The residual stream begins with the states, so there is nothing before its layers."""
        b.mark("layers")
        self.emit_layers(b)
        b.mark("head")
        assert self.head is not None
        if self.draft_tokens is None:
            self.head.emit(b, RESIDUAL, Dtype.FLOAT, LOGITS)
            return
        own = b.scratch("own logits", -(-self.head.matrix.rows // PANEL) * PANEL * 4)
        self.head.emit(b, RESIDUAL, Dtype.FLOAT, own)
        self.draft_tokens.emit(b, own)

    def emit_layers(self, b: ProgramBuilder) -> None:
        """Add `embed` and `forward` to a native program, from states to outputs in the residual stream; not called for
        heads whose spec is `lacking` something."""
        raise NotImplementedError

    def share(self, target: CausalLM) -> None:
        """Use the embedding and the head of this model, if the head has none of its own."""
        if self._target:
            self._target = [target]

    @abstractmethod
    def states(self, kept: Tensor, target: CausalLM) -> Tensor:
        """Return the states beside the tokens, from those kept of the target: [T, places, size] to [T, hidden_size]."""

    def embed(self, step: StepInput) -> Tensor:
        """Return the embeddings of `step.input_ids`, [T, hidden_size]."""
        embedding: Embedding = self.embedding or self._target[0].embedding
        return embedding(step.input_ids)

    def final(self, hidden: Tensor) -> Tensor:
        """Return the input of the output head, [S, hidden_size]."""
        return hidden

    def likeliest(self, hidden: Tensor, count: int) -> Tensor:
        """Return the most likely tokens, [S, count] int64."""
        found = self._own_logits(hidden).topk(count, dim=1).indices
        return found if self.draft_tokens is None else self.draft_tokens.ids[found]

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the tokens that the head can draw, [S, draft vocabulary]."""
        head: Linear | TiedHead = self.head or self._target[0].head
        dtype = self._dtype if self.head is not None else self._target[0].dtype
        delta, head.delta = head.delta, None  # an adapter of the target is for the target's rows
        found = head.wide(self.final(hidden).to(dtype))
        head.delta = delta
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [S, vocab_size] float32."""
        found = self._own_logits(hidden).float()
        if self.draft_tokens is None:
            return found
        whole = found.new_full((len(found), self.spec.vocab_size), float("-inf"))
        return whole.index_copy_(1, self.draft_tokens.ids, found)


class EagleModel(HeadModel):
    """EAGLE, the first version."""

    def __init__(self, b: Build, spec: HeadSpec, target: CausalLM | None, tables: Set[str]) -> None:
        super().__init__(b, spec, target, tables)
        size, own = spec.hidden_size, spec.decoder
        self.fc = b.linear("fc", inputs=2 * size, outputs=size, shard=NONE, bias=spec.bias)
        self.rope = b.rope(own.rope)
        self.layers = nn.ModuleList(
            DecoderLayer(b.at("layers", i), own if i == 0 else replace(own, norms=PRE), i, self.rope)
            for i in range(own.num_layers)
        )
        self.finish()

    def states(self, kept: Tensor, target: CausalLM) -> Tensor:
        return target.final(kept[:, 0].to(_stream_dtype(target)))

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """See `CausalLM.forward`."""
        joined = self.fc(torch.cat([x, self.given[: len(x)].to(x.dtype)], 1))
        stream, last = Stream(joined.to(self.residual_dtype)), len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            layer(stream, step, step.hidden_rows if i == last else None)
        return stream.total()

    def emit_layers(self, b: ProgramBuilder) -> None:
        assert self.embedding is not None
        size = self.spec.hidden_size
        pair = b.scratch("pair", 2 * size * 4)
        self.embedding.emit_lookup(b, output=pair)
        b.run_beside()
        b.copy(RESIDUAL, pair, size, begin=size)
        self.fc.emit(b, pair, Dtype.FLOAT, RESIDUAL)
        emit_layers(b, self.layers, self._dtype)


class Eagle3Model(HeadModel):
    """EAGLE-3: one layer that attends over embeddings and states side by side."""

    def __init__(self, b: Build, spec: HeadSpec, target: CausalLM | None, tables: Set[str]) -> None:
        super().__init__(b, spec, target, tables)
        size, own, at = spec.hidden_size, spec.decoder, b.at("midlayer")
        inputs = len(spec.places) * spec.target_size
        self.fc = b.linear("fc", inputs=inputs, outputs=size, shard=NONE, bias=spec.bias)
        self.layers = nn.ModuleList()
        self.places_norm = make_norm(b, "input_norm", inputs, own.norm) if spec.normed_places else None
        self.rope = b.rope(own.rope)
        self.input_norm = make_norm(at, "input_layernorm", size, own.norm)
        self.state_norm = make_norm(at, "hidden_norm", size, own.norm)
        self.post_norm = make_norm(at, "post_attention_layernorm", size, own.norm)
        self.attention = _WideAttention(at.at("self_attn"), spec, self.rope)
        self.none = NoNorm("", b.device, b.dtype, 2 * size)
        self.mlp = make_feed_forward(at.at("mlp"), own, 0)
        self.norm = make_norm(b, "norm", size, own.norm)
        self.finish()

    def states(self, kept: Tensor, target: CausalLM) -> Tensor:
        joined = kept.flatten(1)
        if self.places_norm is not None:
            joined = self.places_norm(joined.to(self.residual_dtype))
        return self.fc(joined.to(self._dtype))

    def final(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """See `CausalLM.forward`."""
        given = self.given[: len(x)]
        state = self.state_norm(given)
        pair = torch.cat([self.input_norm(x.to(self.residual_dtype)), state], 1)
        attended = self.attention(Stream(pair), self.none, step)
        stream = Stream(state.to(self.residual_dtype) if self.spec.normed_residual else given)
        if step.hidden_rows is not None:
            stream.choose(step.hidden_rows)
            attended = attended.index_select(0, step.hidden_rows)
        self.attention.out.into(stream, attended)
        assert self.mlp is not None
        self.mlp.out.into(stream, self.mlp(stream, self.post_norm))
        return stream.total()


class _WideAttention(Attention):
    """Attention whose input is twice as wide as its output."""

    def __init__(self, b: Build, spec: HeadSpec, rope: Rope) -> None:
        own = spec.decoder
        super().__init__(b, replace(own, hidden_size=2 * own.hidden_size), 0, rope)
        inputs = Heads(own.num_heads, own.num_kv_heads, own.head_dim).outputs[0]
        self.out = b.linear("o_proj", inputs=inputs, outputs=own.hidden_size, shard=ROW, bias="o" in own.biases)


class MtpModel(HeadModel):
    """The first layer for multi-token prediction that a checkpoint has behind the target's layers."""

    def __init__(self, b: Build, spec: HeadSpec, target: CausalLM | None, tables: Set[str]) -> None:
        super().__init__(b, spec, target, tables)
        size, own = spec.hidden_size, spec.decoder
        last = own.num_layers - 1
        at = b.at("model", "layers", last)
        self.embedding_norm = make_norm(at, "enorm", size, own.norm)
        self.state_norm = make_norm(at, "hnorm", size, own.norm)
        self.fc = at.linear("eh_proj", inputs=2 * size, outputs=size, shard=NONE)
        self.rope = b.rope(own.rope_of(last), rotates_first=own.rotates_first)
        self.layers = nn.ModuleList([DecoderLayer(at, own, last, self.rope)])
        self.norm = make_norm(at.at("shared_head"), "norm", size, own.norm) if spec.form.final_norm else None
        self._form = spec.form
        self.finish()

    def states(self, kept: Tensor, target: CausalLM) -> Tensor:
        return target.final(kept[:, 0].to(_stream_dtype(target)))

    def final(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm is None or self._form.normed else self.norm(hidden)

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """See `CausalLM.forward`."""
        form, given = self._form, self.given[: len(x)]
        x = (torch.where(step.positions[:, None] == 0, 0, x) if form.masks_first else x).to(self.residual_dtype)
        pair = [self.embedding_norm(x), self.state_norm(given)]
        stream = Stream(self.fc(torch.cat(pair[::-1] if form.state_first else pair, 1)).to(self.residual_dtype))
        self.layers[0](stream, step, step.hidden_rows)
        hidden = stream.total()
        return self.norm(hidden) if form.normed and self.norm is not None else hidden


def _stream_dtype(target: CausalLM) -> torch.dtype:
    return getattr(target, "residual_dtype", torch.float32)


MODELS: dict[str, type[HeadModel]] = {"eagle": EagleModel, "eagle3": Eagle3Model, "mtp": MtpModel}
