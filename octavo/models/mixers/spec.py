"""Kinds of mixers, as entries of `DecoderSpec.mixers`. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """The part of a layer that passes information between tokens. Each kind is a subclass with the parameters that
    `DecoderSpec` does not have, and a line in `table.py`."""

    @property
    def path(self) -> str:
        """The mixer's place below its layer; `DecoderSpec.stored` maps a checkpoint's own names to it."""
        raise NotImplementedError

    @property
    def lacking(self) -> str | None:
        """What the CPU's native program lacks for this mixer; None if it has an `emit`."""
        return "recurrent layers"


@dataclass(frozen=True, slots=True)
class SelfAttention(MixerSpec):
    """Grouped-query attention; its parameters are fields of `DecoderSpec`."""

    @property
    def path(self) -> str:
        return "self_attn"

    @property
    def lacking(self) -> str | None:
        return None


ATTENTION = SelfAttention()
