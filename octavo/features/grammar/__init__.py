"""Structured output: each token is chosen among those that a grammar allows.

`lower.py` turns every form that a request may ask for into one grammar, `compiler.py` compiles it outside the step loop
and caches it, `engine.py` follows each request through its grammar and makes masks, `worker.py` applies them to logits.
"""
