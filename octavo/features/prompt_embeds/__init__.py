"""Embeddings in prompts, given by clients.

`engine.py` finds out which of them a step needs, `worker.py` puts them where the model's own would stand. The prompt's
token ids are placeholders there, and its keys digests, so that the KV cache is shared by equal embeddings alone.
"""

from __future__ import annotations

from octavo.core.embeds import OPTION
from octavo.features import Feature, FeatureContext
from octavo.features.prompt_embeds.engine import EmbedsEngine
from octavo.features.prompt_embeds.worker import EmbedsWorker


def build(context: FeatureContext) -> Feature | None:
    """None unless the settings want it. Costs nothing until the first such request."""
    if not context.prompt_embeds or context.whole_prompts:
        return None
    return Feature(name=OPTION, engine=EmbedsEngine(OPTION), worker=EmbedsWorker(OPTION))
