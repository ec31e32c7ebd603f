"""Beam search: find the most likely continuations of a prompt.

`text.py` reads a request, `search.py` is the algorithm, `engine.py` applies it to the request's sequences in lockstep,
and `api.py` has the types of `LLM.beam_search`. There is no worker half: each beam is a sequence that reports its most
likely tokens.
"""
