"""Structured output: each token is chosen among those that a grammar allows.

`lower.py` makes one grammar of every form a request may ask for, `compiler.py` compiles it off the step loop and keeps
it, `engine.py` follows each request through its grammar and makes masks, `worker.py` applies them to logits.
"""

from __future__ import annotations

from octavo.features import Feature, FeatureContext
from octavo.features.grammar.compiler import Compiler
from octavo.features.grammar.engine import GrammarEngine
from octavo.features.grammar.worker import GrammarWorker

NAME = "grammar"


def build(context: FeatureContext) -> Feature:
    """Costs nothing until the first request with a grammar."""
    compiler = Compiler(context.load_tokenizer, context.vocab_size, context.eos_token_ids, context.structured_outputs)
    return Feature(name=NAME, engine=GrammarEngine(NAME, compiler, context.device), worker=GrammarWorker(NAME))
