"""`Implementation`: what builds the models of an architecture. Octavo's own layers, or a feature's."""

from __future__ import annotations

from typing import Protocol

from octavo.models.attention import widest_attention
from octavo.models.decoder import CausalLM
from octavo.models.hf_config import Config
from octavo.models.load.arranged import arranged
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.model import LayeredModel, ModelSpec
from octavo.models.registry import spec_of
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.base import AttentionSpec
from octavo.nn.build import Build
from octavo.nn.latent.base import LatentSpec
from octavo.parallel.mesh import ALONE, Mesh


class Implementation(Protocol):
    """Builds models without weights, which the loader then fills.

    Attributes:
        name: of another implementation than Octavo's own, for display; else "".
    """

    name: str

    def spec_of(self, config: Config) -> ModelSpec:
        """Return the spec of a checkpoint's configuration.

        Raises:
            ConfigError: the architecture or a feature of the configuration is not supported.
            ModelFileError: a field is missing.
        """
        ...

    def attention(self, spec: ModelSpec, mesh: Mesh = ALONE) -> AttentionSpec | LatentSpec:
        """Return a rank's attention layer that the backend is chosen for, and after which all layers' caches are
        shaped."""
        ...

    def build(self, b: Build, spec: ModelSpec) -> LayeredModel:
        """Build the model of a spec that `spec_of` returned."""
        ...

    def named(self, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        """Return the checkpoint with the names and the arrangement of the model's tensors."""
        ...


class OwnLayers:
    """Octavo's own layers: the families of `registry.py`."""

    name = ""

    def spec_of(self, config: Config) -> DecoderSpec:
        return spec_of(config)

    def attention(self, spec: ModelSpec, mesh: Mesh = ALONE) -> AttentionSpec | LatentSpec:
        assert isinstance(spec, DecoderSpec)
        return widest_attention(spec, mesh)

    def build(self, b: Build, spec: ModelSpec) -> LayeredModel:
        assert isinstance(spec, DecoderSpec)
        return CausalLM(b, spec)

    def named(self, checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
        assert isinstance(spec, DecoderSpec)
        return arranged(checkpoint, spec)


OWN = OwnLayers()
