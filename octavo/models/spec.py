"""Parameters that distinguish decoders. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from octavo.models.feed_forwards.spec import FeedForwardSpec
from octavo.models.mixers.spec import ATTENTION, LatentSelfAttention, MixerSpec, SelfAttention
from octavo.nn.rope_spec import RopeSpec


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm over the last dimension.

    Attributes:
        kind: "rms" for RMSNorm, "layer" for LayerNorm.
        offset: added to the stored weight; 1 for Gemma, whose weights are differences from one.
        scaled, bias: whether there is a weight, and a bias; an RMSNorm has no bias.
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    scaled: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys before they are rotated.

    Attributes:
        over: "head" for one norm that all heads share; "heads" for the same with a weight per head; "all" for one norm
            over all channels of a token.
        rotated: heads are rotated first; of RMSNorms over a head.
        values: of each head's values; None for none.
    """

    norm: NormSpec
    over: Literal["head", "heads", "all"] = "head"
    rotated: bool = False
    values: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Where a layer normalizes: the name of each norm, or None where there is none.

    Attributes:
        parallel: mixer and feed-forward both read the layer's input, and their sum is added to it. Without
            `before_mlp`, both read the same normalized input.
    """

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    parallel: bool = False


PRE = LayerNorms()
"""Llama's: before each part."""
POST = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
"""OLMo 2's: after each part, before its sum with the residual stream."""
SANDWICH = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
"""Gemma 2's: before and after each part."""
PARALLEL = LayerNorms(before_mlp=None, parallel=True)
"""GPT-J's: one norm before both parts."""
PARALLEL_TWO = LayerNorms(parallel=True)
"""GPT-NeoX's: both parts in parallel, each with a norm of its own."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Constants that scale embeddings, each part's output before its sum with the residual stream, and logits."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerInputSpec:
    """Further inputs of each layer, made from a token's id and embedding (per-layer embeddings, Gemma 3n and 4).

    Attributes:
        size: values of a layer's input.
        rows: of the table that has those of all layers for each id.
        activation: a name of `nn/ops/activation.py`.
    """

    size: int
    rows: int
    activation: str


@dataclass(frozen=True, slots=True)
class StoredModule:
    """A module of the checkpoint, and the modules of Octavo's decoder that it holds.

    The rows of its weight (and the elements of its bias) are, over and over, a run for each of `names`.

    Attributes:
        name: below the checkpoint's base model; "{}" is a number: the layer's, and the expert's if there is a second.
            The name of a tensor renames it. A name with the number of a layer comes before one for all of them.
        names: below "model.", with the same numbers; those that begin with "lm_head" or "rope_freqs" are not.
        sizes: rows of each name's run; empty if each name is of all rows.
        transposed: the weight is stored as [inputs, outputs].
        shift: added to the stored weight, but not to the bias.
        form: of its tensors, if it is another: "decay" for negative rates of decay in place of their logarithms, "flat"
            for several dimensions in place of one, "taps" for a convolution's weight [channels, taps].
    """

    name: str
    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False
    shift: float = 0.0
    form: Literal["", "decay", "flat", "taps"] = ""


@dataclass(frozen=True, slots=True)
class StoredStack:
    """A tensor of the checkpoint that has, in its first dimension, one of the same kind for each expert.

    Attributes:
        name: of the tensor, below the checkpoint's base model; "{}" is a layer's number.
        names: tensors of an expert that it holds, below "model."; "{}" are the numbers of layer and expert. Each has an
            equal number of rows.
        transposed: each expert's matrix is stored as [inputs, outputs].
        inputs: of each matrix, if checkpoints have either form: those whose last dimension is another are transposed;
            0 if all have the same.
        alternating: the rows of `names` alternate, instead of one name's following those of another.
    """

    name: str
    names: tuple[str, ...]
    transposed: bool = False
    alternating: bool = False
    inputs: int = 0


def renamed(names: Mapping[str, str]) -> tuple[StoredModule, ...]:
    """Return modules that only have other names: the checkpoint's -> the decoder's."""
    return tuple(StoredModule(theirs, (ours,)) for theirs, ours in names.items())


@dataclass(frozen=True, slots=True)
class StoredNames:
    """How a family's checkpoints name and arrange tensors, where that differs from Llama's.

    Attributes:
        root: the prefix of the base model's tensors; "" for none. Checkpoints of the bare model may lack it, or its
            first part.
        modules: those with other names or arrangements; all others keep their names.
        ignored: ends of names of tensors that are not weights.
        stacks: tensors that hold those of all experts of a layer.
        foreign: beginnings of names of tensors that the decoder does not use, such as an audio encoder's.
        nested: the checkpoint is of a model with images; this is its text half.
        alternating_heads: in gated delta nets, a head of values belongs to another head of keys than its neighbour;
            otherwise those of the same head of keys follow each other.
    """

    root: str = "model"
    modules: tuple[StoredModule, ...] = ()
    ignored: tuple[str, ...] = ()
    stacks: tuple[StoredStack, ...] = ()
    foreign: tuple[str, ...] = ()
    nested: bool = False
    alternating_heads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A decoder-only model: layers of a mixer and a feed-forward, with norms around them.

    Loader, decoder, CPU program and GPU runner read these fields; none of them knows a family.

    Attributes:
        mlps: each layer's feed-forward; None in a layer that has only a mixer.
        mixers: each layer's mixer, None in a layer that has only a feed-forward; empty for attention in all layers.
        rope: rotary embedding of all layers without an entry in `ropes`.
        ropes: that of each layer, if they differ; empty if not.
        windows: each layer's sliding window in tokens; None for full attention.
        bidirectional: tokens attend to later ones, too, and windows reach as far ahead as back.
        chunked: windows begin at multiples of their size, instead of sliding.
        sinks: attention has a score per head of a key without a value (gpt-oss).
        biases: those of "qkv", "o", "mlp" and "head" that have biases.
        norm: of the layers, and the final one.
        head_norms: of queries and keys; None for none.
        scale: multiplies q·k before the softmax; None for head_dim ** -0.5.
        attention_cap, logit_cap: scores and logits become cap * tanh(x / cap); None leaves them unchanged.
        alibi: factor of the slopes of linear attention biases (https://arxiv.org/abs/2108.12409); 0 for no biases.
        learned_positions: rows of a table of position embeddings that is added to the first layer's input; 0 for none.
        position_offset: first row of that table in use.
        embedding_norm: of the first layer's input; None for none.
        qkv_clip: largest magnitude of queries, keys and values; None for no limit.
        layer_inputs: None for none.
        layer_scales: the residual stream is multiplied by a stored number after each layer.
        tied: whether the output head is the embedding table.
        num_labels: outputs of the classification head; 0 for none.
        score_tokens: name of the language model's head, and the tokens whose rows make the classification head; None if
            it is stored.
        stored: names and arrangement of the checkpoint's tensors.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    mlps: tuple[FeedForwardSpec | None, ...]
    norm: NormSpec
    rope: RopeSpec
    windows: tuple[int | None, ...]
    bidirectional: bool = False
    chunked: bool = False
    sinks: bool = False
    mixers: tuple[MixerSpec | None, ...] = ()
    ropes: tuple[RopeSpec, ...] = ()
    biases: frozenset[str] = field(default=frozenset())
    norms: LayerNorms = PRE
    head_norms: HeadNorms | None = None
    scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    alibi: float = 0.0
    learned_positions: int = 0
    position_offset: int = 0
    embedding_norm: NormSpec | None = None
    qkv_clip: float | None = None
    multipliers: Multipliers = Multipliers()
    layer_inputs: LayerInputSpec | None = None
    layer_scales: bool = False
    tied: bool = False
    num_labels: int = 0
    score_tokens: tuple[str, tuple[int, ...]] | None = None
    stored: StoredNames = StoredNames()

    def mixer_of(self, layer: int) -> MixerSpec | None:
        """Return a layer's mixer; None if it has only a feed-forward."""
        return self.mixers[layer] if self.mixers else ATTENTION

    def heads_of(self, layer: int) -> tuple[int, int, int]:
        """Return the query heads, key-value heads and channels of a head of a layer with attention."""
        own = self.mixer_of(layer)
        assert isinstance(own, SelfAttention)
        return self.num_heads, own.kv_heads or self.num_kv_heads, own.head_dim or self.head_dim

    @property
    def lacking(self) -> str | None:
        """What the CPU's kernels lack for one of its layers; None for nothing."""
        parts = dict.fromkeys((*self.mlps, *(self.mixer_of(layer) for layer in range(self.num_layers))))
        reasons = (part.lacking for part in parts if part is not None)
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def summary(self) -> Literal["mean", "last"]:
        """Pooling, unless the checkpoint states it. Without later ones to read, a token knows only what precedes it."""
        return "mean" if self.bidirectional and not self.num_labels else "last"

    @property
    def attention_layers(self) -> list[int]:
        """The layers with attention over keys and values."""
        return [i for i in range(self.num_layers) if isinstance(self.mixer_of(i), SelfAttention)]

    @property
    def attends(self) -> bool:
        """Whether some layers have attention, or latent attention."""
        return any(isinstance(self.mixer_of(i), SelfAttention | LatentSelfAttention) for i in range(self.num_layers))

    def rope_of(self, layer: int) -> RopeSpec:
        """Return a layer's rotary embedding."""
        return self.ropes[layer] if self.ropes else self.rope

    def without_windows(self) -> DecoderSpec:
        """Return the spec with full attention in all layers, for sequences shorter than any window."""
        narrowest = min((window for window in self.windows if window is not None), default=None)
        if narrowest is None:
            return self
        return self._with_limit(narrowest, windows=(None,) * self.num_layers)

    def within(self, max_length: int | None) -> DecoderSpec:
        """Return the spec for sequences of at most this many tokens; None for the model's own limit.

        LongRoPE has factors for long contexts, and others for contexts as long as in training. A model without
        attention has no limit. Tables of rotations are no longer than the sequences.
        """
        if max_length is None:
            return self
        if not self.attends:
            return replace(self, rope=replace(self.rope, max_position=max_length))
        limited = self._with_limit(max_length, windows=self.windows)
        return replace(limited, rope=limited.rope.within(max_length))

    @property
    def intermediate_size(self) -> int:
        """Values of a token in front of the last product of the widest feed-forward or recurrent mixer."""
        parts = (*self.mlps, *self.mixers)
        return max((part.width for part in parts if part is not None), default=0)

    @property
    def max_position(self) -> int:
        """Maximum number of tokens of a sequence."""
        return self.rope.max_position

    @property
    def attention_scale(self) -> float:
        """The factor of q·k before the softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def rotates_first(self) -> bool:
        """Whether queries and keys are normalized after their rotation."""
        return self.head_norms is not None and self.head_norms.rotated

    @property
    def fuses_head_norms(self) -> bool:
        """Whether norms of queries and keys, if any, can be computed together with the rotation."""
        norms = self.head_norms
        return norms is None or (norms.over == "head" and norms.norm.kind == "rms" and not norms.rotated)

    def _with_limit(self, limit: int, *, windows: tuple[int | None, ...]) -> DecoderSpec:
        def limited(rope: RopeSpec) -> RopeSpec:
            return replace(rope, max_position=min(rope.max_position, limit))

        ropes = tuple(limited(rope) for rope in self.ropes)
        return replace(self, rope=limited(self.rope), ropes=ropes, windows=windows)
