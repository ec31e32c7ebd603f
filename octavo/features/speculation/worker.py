"""The worker half: what drafts by the chosen method."""

from __future__ import annotations

from octavo.features import FeatureContext
from octavo.features.speculation.config import HEAD_METHODS
from octavo.features.speculation.lookup_drafters import lookup_drafter
from octavo.features.speculation.settings import drafting
from octavo.worker.hooks import WorkerHook


def build_worker(context: FeatureContext) -> WorkerHook | None:
    config = drafting(context)
    if config is None:
        return None
    if config.method == "draft_model":
        from octavo.features.speculation.draft_model import ModelDrafter  # needs the worker, which imports this module

        return ModelDrafter(config, context)
    if config.method in HEAD_METHODS:
        from octavo.features.speculation.heads.drafter import HeadDrafter

        return HeadDrafter(config, context)
    if config.method == "medusa":
        from octavo.features.speculation.heads.medusa import MedusaDrafter

        return MedusaDrafter(config, context)
    return lookup_drafter(config, context.device)
