"""What a drafting model or a head takes, before it is loaded. It needs torch only when it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from octavo.core.errors import ConfigError
from octavo.features import FeatureContext
from octavo.features.speculation.config import HEAD_METHODS, DraftConfig
from octavo.features.speculation.draft_files import check_layers, draft_files
from octavo.features.speculation.settings import drafting

if TYPE_CHECKING:
    from octavo.worker.hooks import Reserved
    from octavo.worker.planned import Needs, Planned

FLAGS = frozenset({"speculative-config", "spec-method", "spec-model", "spec-tokens"})


def estimate(context: FeatureContext, planned: Planned, limits: tuple[int, int]) -> Needs | None:
    from octavo.worker.planned import Needs

    config = drafting(context)
    if config is None:
        return None
    if config.method == "medusa":
        config = config.at_most(draft_files(config, context).config.get("medusa_num_heads"))
    needs = Needs(drafts=config.most_drafts)
    if not planned.stage.last:
        return needs
    if config.method == "draft_model":
        check_layers(config, planned.cache_groups)
        return replace(needs, name="drafting model", reserved=_model(config, context, planned, limits))
    if config.method in HEAD_METHODS:
        check_layers(config, planned.cache_groups)
        return replace(needs, name="drafting head", reserved=_head(config, context, planned, limits))
    if config.method == "medusa":
        return replace(needs, name="drafting heads", reserved=_medusa(config, context, planned, limits))
    return needs


def _model(config: DraftConfig, context: FeatureContext, planned: Planned, limits: tuple[int, int]) -> Reserved:
    from octavo.models.encoders.registry import is_encoder

    files = draft_files(config, context)
    if is_encoder(files.config):
        raise ConfigError(
            f"speculative_config: model={files.name!r} makes vectors, not text. Name a model that generates text."
        )
    return planned.companion(files).reserved_for(limits)


def _head(config: DraftConfig, context: FeatureContext, planned: Planned, limits: tuple[int, int]) -> Reserved:
    import torch

    from octavo.features.speculation.heads.drafter import head_files, states_bytes
    from octavo.features.speculation.heads.layers import HeadLayers
    from octavo.features.speculation.heads.spec import HeadSpec, Kind
    from octavo.models.decoder import CausalLM
    from octavo.models.load import open_checkpoint
    from octavo.models.spec import DecoderSpec
    from octavo.worker.hooks import Reserved

    files = planned.files if config.method == "mtp" else head_files(config, context, planned.dtype)
    own = open_checkpoint(files, "auto" if files.weights else "dummy")
    target = cast("CausalLM", planned.model)
    shared = target if not planned.native and (target.is_whole or target.spec.tied) else None
    torch_needed = "" if planned.native and config.tree is None and planned.mesh.size == 1 else "as planned"
    kind, spec = cast("Kind", config.method), cast("DecoderSpec", planned.spec)
    layers = HeadLayers(kind, spec, shared, own, planned.checkpoint(), torch_needed)
    narrow = planned.on_cpu and planned.dtype == torch.float32
    companion = planned.companion(files, layers, "auto" if narrow else None, rounded=planned.has_integers)
    head = cast("HeadSpec", companion.spec)
    states = states_bytes(head, limits, planned.dtype, config.tree, waits=planned.on_cpu)
    return companion.reserved_for(limits) + Reserved(workspace=states)


def _medusa(config: DraftConfig, context: FeatureContext, planned: Planned, limits: tuple[int, int]) -> Reserved:
    """Count biases, too, which some checkpoints lack."""
    from octavo.models.hf_config import whole
    from octavo.worker.hooks import Reserved

    stated = draft_files(config, context).config
    count, depth = whole(stated, "medusa_num_heads"), whole(stated, "medusa_num_layers", 1)
    size, vocab = planned.spec.hidden_size, planned.spec.vocab_size
    each = depth * (size * size + size) + vocab * size
    states = (max(limits) + 2) * size * planned.dtype.itemsize
    return Reserved(min(count, config.most_drafts) * each * planned.dtype.itemsize, states)
