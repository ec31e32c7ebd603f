"""Thinking budget: reasoning that has taken as many tokens as it may is ended, and the model goes on with its answer.

`engine.py` counts tokens and says which one must come next, `worker.py` sees to it that no other can be sampled.
"""
