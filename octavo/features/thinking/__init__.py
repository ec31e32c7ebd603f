"""Thinking budget: end reasoning at a limit of tokens, so that the model continues with its answer.

`engine.py` counts tokens and forces the end mark, `worker.py` masks all other tokens.
"""
