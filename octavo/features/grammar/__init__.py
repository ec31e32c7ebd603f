"""Structured output: sample each token from those that a grammar allows.

`lower.py` converts a request's constraint to a grammar, `compiler.py` compiles it outside the step loop and caches it,
`engine.py` advances each request's matcher and computes masks, `worker.py` applies them to logits.
"""
