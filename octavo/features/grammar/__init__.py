"""Structured output: each token is chosen among those that a grammar allows.

`lower.py` makes one grammar of every form a request may ask for, `compiler.py` compiles it off the step loop and keeps
it, `engine.py` follows each request through its grammar and makes masks, `worker.py` applies them to logits.
"""
