"""The decoder of all families, with the variations that `DecoderSpec` describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.models.feed_forwards.table import make_feed_forward
from octavo.models.kinds import count_until_all_kinds
from octavo.models.layer_inputs import LayerInput, LayerInputs
from octavo.models.mixers.shared_attention import share_caches
from octavo.models.mixers.table import make_mixer
from octavo.models.norms import make_norm
from octavo.models.score import ScoreHead, TokenScore
from octavo.models.spec import DecoderSpec
from octavo.native.bindings import Dtype, Function
from octavo.native.builder import ATTENDED, RESIDUAL, ProgramBuilder, Results
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.build import Build
from octavo.nn.divided import DividedLogits
from octavo.nn.embedding import Embedding, TiedHead
from octavo.nn.experts import ExpertLayer
from octavo.nn.latent.layer import PagedLatents
from octavo.nn.linear import Projection
from octavo.nn.norm import Norm
from octavo.nn.quant.packed import DTYPES
from octavo.nn.quant.panels import PANEL
from octavo.nn.rope import Rope
from octavo.nn.rounded import Activations
from octavo.nn.shard import COL, NONE
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream, StreamOutput
from octavo.nn.stream_scale import StreamScale
from octavo.nn.taps import Taps


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward, with the family's norms around them, each added to the residual stream.

    Attributes:
        mixer, mlp: one of them is None in a layer that has only the other.
        input: adds the layer's own input, if the model has such (`DecoderSpec.layer_inputs`).
    """

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__()
        norms, size = spec.norms, spec.hidden_size
        self.parallel, self.multiplier = norms.parallel, spec.multipliers.residual
        self.mixer = make_mixer(b, spec, layer, rope)
        self.mlp = make_feed_forward(b.at("mlp"), spec, layer)

        def norm(name: str | None, *, exists: bool) -> Norm:
            return make_norm(b, name if exists else None, size, spec.norm)

        mixes, feeds = self.mixer is not None, self.mlp is not None
        self.input_norm = norm(norms.before_mixer, exists=mixes)
        self.mixed_norm = norm(norms.after_mixer, exists=mixes) if norms.after_mixer else None
        shared = norms.parallel and norms.before_mlp is None
        self.post_norm = self.input_norm if shared else norm(norms.before_mlp, exists=feeds)
        self.mlp_norm = norm(norms.after_mlp, exists=feeds) if norms.after_mlp else None
        self.input = LayerInput(b, spec, layer) if spec.layer_inputs else None
        self.scale = StreamScale(b.at("layer_scalar").path, b.device) if spec.layer_scales else None

    def forward(self, stream: Stream, step: StepInput, rows: Tensor | None = None, given: Tensor | None = None) -> None:
        """Add the layer's outputs to the stream; with `rows` [S], compute only these tokens after the mixer.

        Args:
            given: the layer's own input, [T, size]; None if it has none.
        """
        inner = self.mix(stream, step, rows)
        self.feed(stream, inner, given if given is None or rows is None else given.index_select(0, rows))

    def mix(self, stream: Stream, step: StepInput, rows: Tensor | None = None) -> Any:
        """Compute the first part of `forward`, up to the mixer's output; return what `feed` needs."""
        mixed: Activations | None = None
        if self.mixer is not None:
            if rows is None:
                mixed = self.mixer.activations(stream, self.input_norm, step)
            else:
                mixed = self.mixer(stream, self.input_norm, step).index_select(0, rows)
        stream.choose(rows)
        inner = self.mlp(stream, self.post_norm) if self.parallel and self.mlp is not None else None
        if self.mixer is not None and mixed is not None:
            self._add(stream, self.mixer.out, mixed, self.mixed_norm)
        return inner

    def feed(self, stream: Stream, inner: Any, given: Tensor | None = None) -> None:
        """Compute the second part of `forward`, the feed-forward and what follows it.

        Args:
            inner: the result of `mix`.
            given: the layer's own input, of the stream's tokens.
        """
        if self.mlp is not None:
            self._add(stream, self.mlp.out, self.mlp(stream, self.post_norm) if inner is None else inner, self.mlp_norm)
        if self.input is not None:
            assert given is not None, "the layer has an input of its own"
            self.input(stream, given)
        if self.scale is not None:
            self.scale(stream)

    def _add(self, stream: Stream, out: StreamOutput[Any], x: Any, norm: Norm | None) -> None:
        """Add norm(out(x)), times the multiplier, to the stream."""
        if norm is None and self.multiplier == 1.0:
            out.into(stream, x)
            return
        y = out(x) if norm is None else norm(out(x))
        stream.add_later(y if self.multiplier == 1.0 else y.mul_(self.multiplier))

    @property
    def outputs(self) -> list[StreamOutput[Any]]:
        """The last operation of each part, whose outputs are added to the residual stream."""
        return [part.out for part in (self.mixer, self.mlp) if part is not None]

    @property
    def after_mixer(self) -> list[Projection]:
        """The projections that compute only the tokens of `rows`."""
        mixed = [] if self.mixer is None else [self.mixer.out]
        late = [*mixed, *(() if self.mlp is None else self.mlp.modules())]
        return [one for one in late if isinstance(one, Projection)]

    def emit(self, b: ProgramBuilder, dtype: torch.dtype, mixed: int, kept: int | None = None) -> None:
        """Add `forward` to a native program; `mixed` is the buffer for the mixer's output.

        The last mark "rest" is the place from which on tokens are independent.

        Args:
            kept: where the layer's own input is put in `mixed`, behind the mixer's output: what follows the mark may be
                computed for some tokens only. None leaves it where it is.
        """
        mixer, mlp = self.mixer, self.mlp
        if mixer is not None:
            mixer.emit(b, self.input_norm, dtype, mixed)
        if self.input is not None and kept is not None:
            self.input.emit_kept(b, mixed, kept)
        b.mark("rest")
        if mlp is not None and self.parallel:  # it reads the layer's input, without the mixer's output
            mlp.emit(b, self.post_norm, self.mlp_norm, self.multiplier)
        if mixer is not None:
            mixer.out.emit_into(b, mixed, DTYPES[dtype], self.mixed_norm, self.multiplier)
        if mlp is not None and not self.parallel:
            mlp.emit(b, self.post_norm, self.mlp_norm, self.multiplier)
        if self.input is not None:
            self.input.emit(b, None if kept is None else (mixed, kept))
        if self.scale is not None:
            self.scale.emit(b, self.post_norm.size)


def mixed_width(layers: Iterable[nn.Module]) -> int:
    """Return the values of a token that the widest mixer of packed layers gives to its output projection, in whole
    panels, and those of a layer's own input behind them."""
    own = [layer for layer in layers if isinstance(layer, DecoderLayer)]
    widest = max((layer.mixer.out.matrix.columns for layer in own if layer.mixer is not None), default=0)
    return -(-widest // PANEL) * PANEL + max((layer.input.size for layer in own if layer.input is not None), default=0)


def emit_layers(b: ProgramBuilder, layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Add packed decoder layers to a native program, each from a mark "layer" with its number on. The last one's mixer
    writes to an external buffer."""
    own = [layer for layer in layers if isinstance(layer, DecoderLayer)]
    width = mixed_width(own)
    attended = b.scratch("attended", width * 4)
    for i, layer in enumerate(own):
        b.mark(f"layer {i}")
        if i < len(own) - 1:
            layer.emit(b, dtype, attended)
        else:
            layer.emit(b, dtype, ATTENDED, None if layer.input is None else width - layer.input.size)


class CausalLM(nn.Module):
    """A decoder-only language model in three steps, so that callers can intervene between them.

    Attributes:
        spec: its architecture.
        device: of its weights.
        attention_layers: in layer order.
        divides_logits: the ranks divide the vocabulary.
        layer_range: the layers that it has, of those of `spec`.
        taps: keeps states of chosen layers; None keeps none.
        recordable: whether steps can be recorded in graphs: no layer passes data between host and device.
        cached_layers: these, those with latent attention and the recurrent layers' states, in layer order; the worker
            binds each one's `cache`.
        entry: [tokens, hidden_size], hidden states of the layers before the first one here, in place of embeddings;
            None if the model begins with its embeddings. The worker binds it.
    """

    def __init__(self, b: Build, spec: DecoderSpec) -> None:
        super().__init__()
        model = b.at("model")
        self.spec = spec
        self.device, self.dtype = b.device, b.dtype
        self.residual_dtype = b.residual_dtype(spec.hidden_size)
        # Models are trained with this factor in their own dtype.
        self.embedding_multiplier = torch.tensor(spec.multipliers.embedding, dtype=b.dtype).item()
        self.embedding = model.embedding("embed_tokens", spec.vocab_size, spec.hidden_size, divided=True)
        self.positions = (
            model.embedding("embed_positions", spec.learned_positions, spec.hidden_size, plain=True)
            if spec.learned_positions
            else None
        )
        self.embedding_norm = (
            make_norm(model, "embed_norm", spec.hidden_size, spec.embedding_norm) if spec.embedding_norm else None
        )
        self.layer_inputs = LayerInputs(model, spec) if spec.layer_inputs else None
        tables = dict.fromkeys(spec.ropes or (spec.rope,))
        self.ropes = nn.ModuleList(b.rope(rope, rotates_first=spec.rotates_first) for rope in tables)
        self.layers = nn.ModuleList(
            DecoderLayer(model.for_layers().at("layers", i), spec, i, self.rope_of(i)) for i in range(spec.num_layers)
        )
        share_caches(self.layers)
        self.norm = make_norm(model, "norm", spec.hidden_size, spec.norm)
        shard = NONE if spec.vocab_size % b.mesh.size else COL
        self.head = (
            b.tied_head("lm_head", self.embedding)
            if spec.tied
            else b.linear(
                "lm_head",
                inputs=spec.hidden_size,
                outputs=spec.vocab_size,
                shard=shard,
                bias="head" in spec.biases,
                gather=True,
            )
        )
        self._mesh = b.mesh
        self.divides_logits = b.mesh.size > 1 and not spec.vocab_size % b.mesh.size
        self.score = self._score_head(b, spec)
        self.taps: Taps | None = None
        self.recordable = all(getattr(m, "recordable", True) for m in self.modules())
        self.entry: Tensor | None = None
        self.layer_range = range(spec.num_layers)
        self._list_layers()

    @property
    def is_whole(self) -> bool:
        """Whether it has all layers, and so also the embeddings and the head."""
        return self.is_first and self.is_last

    @property
    def is_first(self) -> bool:
        """Whether it has the first layer, and the embeddings."""
        return self.layer_range.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the last layer, and what follows it: final norm and head."""
        return self.layer_range.stop == self.spec.num_layers

    @property
    def _table(self) -> Embedding | TiedHead:
        """What looks up embeddings in a native program."""
        return self.head if self.is_last and isinstance(self.head, TiedHead) else self.embedding

    def _list_layers(self) -> None:
        self._running = list(enumerate(self.layers, self.layer_range.start))
        self.attention_layers = [m for m in self.modules() if isinstance(m, PagedAttention)]
        self.cached_layers = [m for m in self.modules() if isinstance(m, PagedAttention | PagedLatents | StateCache)]

    @contextmanager
    def in_few_layers(self) -> Iterator[None]:
        """In this block, `forward` runs only some layers, which launch all kernels of the model; its results are
        wrong. Ranks run equally many, since they wait for each other's sums. All ranks must call it."""
        every = self._running
        count = count_until_all_kinds([layer for _, layer in every])
        if self._mesh.size > 1:
            count = self._mesh.largest(count, self.device)
        self._running = [*every[:count], *every[max(count, len(every) - 1) :]]
        try:
            yield
        finally:
            self._running = every

    def keep(self, layers: range) -> None:
        """Drop all other layers; what precedes the first layer, if that is dropped; and what follows the last one, if
        that is dropped. Call before weights are loaded."""
        first, last = layers.start == 0, layers.stop == len(self.layers)
        self.layer_range = layers
        self.layers = self.layers[layers.start : layers.stop]
        if not first:
            self.positions = self.embedding_norm = None
            if not (last and isinstance(self.head, TiedHead)):
                del self.embedding
        if not last:
            self.score = None
            del self.norm, self.head
        self._list_layers()

    def _score_head(self, b: Build, spec: DecoderSpec) -> ScoreHead | None:
        if spec.score_tokens is not None:
            head, tokens = spec.score_tokens
            return TokenScore(b.device, head, spec.vocab_size, spec.hidden_size, tokens)
        return ScoreHead(b.device, spec.hidden_size, spec.num_labels) if spec.num_labels else None

    def rope_of(self, layer: int) -> Rope:
        """Return a layer's table of rotations; layers with equal ones share it."""
        wanted = self.spec.rope_of(layer)
        return next(rope for rope in self.ropes if isinstance(rope, Rope) and rope.spec == wanted)

    def embed(self, step: StepInput) -> Tensor:
        """Return the embeddings of `step.input_ids`, [T, hidden_size], which the caller may modify."""
        if not self.is_first:
            assert self.entry is not None, "the worker has bound no hidden states"
            return self.entry[: step.num_tokens]
        x = self.embedding(step.input_ids).to(self.residual_dtype)
        return x if self.embedding_multiplier == 1.0 else x.mul_(self.embedding_multiplier)

    def forward(self, x: Tensor, step: StepInput) -> Tensor:
        """Run the layers on x [T, hidden_size]; return the states before the final norm: [T, hidden_size], or
        [S, hidden_size] of `step.hidden_rows`.

        Reads and writes the KV caches. Does not modify x.
        """
        stream, last, taps = Stream(self.entering(x, step)), self.layer_range.stop - 1, self.taps
        given = None if self.layer_inputs is None else self.layer_inputs(x, step.input_ids)
        step = self.rotated(step)
        for i, layer in self._running:
            if taps is not None and i in taps.places:
                taps.keep(i, stream.total())
            rows = step.hidden_rows if i == last else None
            layer(stream, step, rows, None if given is None else given[:, i])
            if step.additions and (added := step.addition(i, rows)) is not None:
                stream.add_later(added)
        hidden = stream.total()
        if taps is not None and taps.last:
            taps.keep(last + 1, hidden)
        return hidden

    def rotated(self, step: StepInput) -> StepInput:
        """Return the step with the rotations of its tokens, if their positions differ along several axes."""
        if step.axis_shifts is None:
            return step
        return step.rotated_by(self.rotations(step.positions, step.axis_shifts))

    def rotations(self, positions: Tensor, shifts: Tensor) -> Tensor:
        """Return the rotations of tokens whose positions differ along several axes; see `StepInput.rotations`."""
        (rope,) = self.ropes  # of such models, all layers have the same
        return cast("Rope", rope).along_axes(positions, shifts)

    def entering(self, x: Tensor, step: StepInput) -> Tensor:
        """Return the first layer's input for embeddings x: with learned positions, and normalized, if the model is."""
        if self.positions is not None:
            x = x + self.positions(step.positions + self.spec.position_offset)
        return x if self.embedding_norm is None else self.embedding_norm(x).to(x.dtype)

    def pack(self) -> None:
        """Convert all weights to the CPU kernels' format, for `emit`; `forward` can't be used afterwards."""
        for layer in self.modules():
            if isinstance(layer, Projection | ExpertLayer | Norm):
                layer.pack()
        if self.is_first and self._table is self.embedding:
            self.embedding.pack()
        if self.positions is not None:
            self.positions.pack()
        if self.layer_inputs is not None:
            self.layer_inputs.pack()

    def emit(self, b: ProgramBuilder) -> None:
        """Add the model to a native program: the embedding, from the mark "layers" on `forward`, from the mark "head"
        on `logits`. A stage of a pipeline adds the parts that it has; the residual stream holds the input of others."""
        if self.is_first:
            self._table.emit_lookup(b, self.embedding_multiplier)
        b.mark("layers")
        if self.layer_inputs is not None:
            self.layer_inputs.emit(b)
        if self.positions is not None:
            self.positions.emit_positions(b, self.spec.position_offset)
        if self.embedding_norm is not None:
            self.embedding_norm.emit(b, RESIDUAL, RESIDUAL, Dtype.FLOAT)
        emit_layers(b, self.layers, self.dtype)
        b.mark("head")
        if self.is_last:
            cap, scale = self.spec.logit_cap, self.spec.multipliers.logits
            capped = Results(scale=scale) if cap is None else Results(function=Function.CAP, scale=scale, limit=cap)
            self.head.emit_logits(b, self.norm, capped)

    def final(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to [S, hidden_size]; return the model's dtype."""
        return self.norm(hidden)

    def classify(self, pooled: Tensor) -> Tensor:
        """Return the classification head's outputs: [R, hidden_size] to [R, labels], float32."""
        assert self.score is not None, "the model has no classification head"
        return self.score(pooled)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and head: [S, hidden_size] to [S, vocab_size].

        On a GPU the logits are float32; rounded to bfloat16, those of the best two tokens would often be equal.
        """
        return self.scaled(self.head.after_norm(Stream(hidden), self.norm, wide=True))

    def logits_in_parts(self, hidden: Tensor) -> DividedLogits | None:
        """Return `logits` with this rank's columns only; None if each rank has to have all."""
        if not self.divides_logits:
            return None
        return DividedLogits(self.scaled(self.head.own_after_norm(Stream(hidden), self.norm)), self._mesh)

    def scaled(self, logits: Tensor) -> Tensor:
        """Apply the model's multiplier and cap in place."""
        if self.spec.multipliers.logits != 1.0:
            logits = logits.mul_(self.spec.multipliers.logits)
        cap = self.spec.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
