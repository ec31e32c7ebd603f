"""`HeadSpec`: a drafting head's architecture, from its checkpoint's configuration and the target's spec."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Literal, Self

from octavo.core.errors import ConfigError
from octavo.features.speculation.heads.forms import DEEPSEEK, MtpForm, form_of
from octavo.models.families.llama import llama
from octavo.models.hf_config import Config, only, value_or, whole
from octavo.models.mixers.spec import LatentSelfAttention, SelfAttention
from octavo.models.spec import DecoderSpec, LayerNorms

Kind = Literal["eagle", "eagle3", "mtp"]
ANOTHER = "Name a head that was trained for this model."
"""The remedy for a head that does not fit."""
_ATTENTION = (SelfAttention, LatentSelfAttention)


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head of one or a few decoder layers.

    Attributes:
        kind: how the layers' input is made; see `model.py`.
        decoder: its layers, in the target's positions; for `mtp` all layers of the target and the head's behind them.
        places: where the target's stream is read; see `Taps`.
        target_size: hidden size of the target.
        draft_vocab: tokens that the head can draw; 0 for all of the target's.
        bias: the product that joins states and embeddings has a bias.
        normed_residual: the residual of an EAGLE-3 layer begins with the state after its norm.
        normed_places: what EAGLE-3 reads of all places is normed before the product that joins it.
        form: of `mtp`.
        needs_torch: why it can't be a native program even where there are kernels for its layers; "" if it can.
    """

    kind: Kind
    decoder: DecoderSpec
    places: tuple[int, ...]
    target_size: int
    vocab_size: int
    draft_vocab: int = 0
    bias: bool = False
    normed_residual: bool = False
    normed_places: bool = False
    form: MtpForm = DEEPSEEK
    needs_torch: str = ""

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def intermediate_size(self) -> int:
        return max(self.decoder.intermediate_size, len(self.places) * self.target_size)

    @property
    def tied(self) -> bool:
        return False

    @property
    def max_position(self) -> int:
        return self.decoder.max_position

    @property
    def lacking(self) -> str | None:
        if self.kind != "eagle":
            return f"heads with method={self.kind}"
        return self.needs_torch or self.decoder.lacking

    def within(self, max_length: int | None) -> Self:
        return self

    def without_windows(self) -> Self:
        return self


def head_spec(kind: Kind, config: Config, target: DecoderSpec, names: Set[str]) -> HeadSpec:
    """Return the spec of an EAGLE head's configuration, or of the layers for multi-token prediction of the target's.

    Args:
        names: tensors of the checkpoint; empty for random ones.

    Raises:
        ConfigError: the head does not fit the target.
        ModelFileError: a field of the configuration is missing.
    """
    last = target.num_layers
    bias = any(name.removeprefix("model.") == "fc.bias" for name in names)
    if kind == "mtp":
        form = form_of(names)
        if form is DEEPSEEK and not value_or(config, "num_nextn_predict_layers", 0):
            raise ConfigError(
                "speculative_config: method=mtp needs a model with layers for multi-token prediction "
                "(num_nextn_predict_layers in its config, or tensors of such layers). Choose another method."
            )
        decoder = _with_layer(target, form)
        return HeadSpec("mtp", decoder, (last,), target.hidden_size, target.vocab_size, form=form)
    limits = {"max_position_embeddings": target.max_position}
    decoder = llama({**config, **limits, "tie_word_embeddings": False})
    if any(name.endswith(".self_attn.q_proj.bias") for name in names):  # Qwen2's, whose configs say so in various ways
        decoder = replace(decoder, biases=decoder.biases | {"qkv"})
    # EAGLE's first form goes on with the head's output as the target's state, so that is as large.
    stated = whole(config, "target_hidden_size", decoder.hidden_size) if kind == "eagle3" else decoder.hidden_size
    if stated != target.hidden_size:
        raise ConfigError(
            f"speculative_config: the head is for a model of hidden size {stated}, and the model has "
            f"{target.hidden_size}. {ANOTHER}"
        )
    drawn = _draft_vocab(config, target)
    if kind == "eagle":
        first = replace(decoder, norms=LayerNorms(before_mixer=None))
        return HeadSpec("eagle", first, (last,), target.hidden_size, target.vocab_size, drawn, bias)
    for other in ("fc_norm", "norm_output"):  # norms of EAGLE 3.1
        only(config, other, False)
    return HeadSpec(
        "eagle3",
        decoder,
        _places(config, last),
        target.hidden_size,
        target.vocab_size,
        drawn,
        bias,
        normed_residual=bool(value_or(config, "norm_before_residual", False)),
        normed_places=bool(value_or(_own(config), "norm_before_fc", value_or(config, "norm_before_fc", False))),
    )


def _own(config: Config) -> Config:
    """Return the part of a configuration in which NVIDIA's heads have the fields of EAGLE-3."""
    own = value_or(config, "eagle_config", {})
    return own if isinstance(own, dict) else {}


def _places(config: Config, last: int) -> tuple[int, ...]:
    """Return where an EAGLE-3 head reads the stream of a target with `last` layers."""
    field = "eagle_aux_hidden_state_layer_ids"
    places = _own(config).get(field) or config.get(field) or [2, last // 2, last - 3]
    numbers = isinstance(places, list) and all(type(place) is int and 0 <= place <= last for place in places)
    if not numbers or places != sorted(set(places)):
        raise ConfigError(
            f"speculative_config: the head reads layers {places} of a model with {last} layers; they must be a list of "
            f"ascending numbers from 0 to {last}. {ANOTHER}"
        )
    return tuple(places)


def _draft_vocab(config: Config, target: DecoderSpec) -> int:
    if config.get("draft_vocab_size") is None:
        return 0
    count = whole(config, "draft_vocab_size")
    if count > target.vocab_size:
        raise ConfigError(
            f"speculative_config: the head draws from {count} tokens, and the model has {target.vocab_size}. {ANOTHER}"
        )
    return 0 if count == target.vocab_size else count


def _with_layer(target: DecoderSpec, form: MtpForm) -> DecoderSpec:
    """Return the target's spec with one more layer, like its last with attention."""
    attention = [i for i in range(target.num_layers) if isinstance(target.mixer_of(i), _ATTENTION)]
    like = attention[-1] if attention else target.num_layers - 1
    return replace(
        target,
        num_layers=target.num_layers + 1,
        mlps=(*target.mlps, target.mlps[0 if form.dense else like]),
        windows=(*target.windows, target.windows[like]),
        mixers=(*target.mixers, target.mixers[like]) if target.mixers else (),
        ropes=(*target.ropes, target.ropes[like]) if target.ropes else (),
        tied=False,
    )
