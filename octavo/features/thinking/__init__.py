"""Thinking budget: reasoning that reaches its limit of tokens is ended, and the model goes on with its answer.

`engine.py` counts tokens and decides which one must come next, `worker.py` forbids all others.
"""
