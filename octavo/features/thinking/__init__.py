"""Thinking budget: reasoning that has taken as many tokens as it may is ended, and the model goes on with its answer.

`engine.py` counts tokens and says which one must come next, `worker.py` sees to it that no other can be sampled.
"""

from __future__ import annotations

from octavo.features import Feature, FeatureContext
from octavo.features.thinking.engine import ThinkingEngine
from octavo.features.thinking.worker import ThinkingWorker

NAME = "thinking"


def build(context: FeatureContext) -> Feature:
    """Costs nothing until the first request with a budget."""
    return Feature(name=NAME, engine=ThinkingEngine(NAME, context.load_tokenizer), worker=ThinkingWorker(NAME))
