"""Beam search: the most likely continuations of a prompt, searched several at a time.

`text.py` reads a request, `search.py` is the arithmetic, `engine.py` makes it the lockstep of the request's sequences,
and `api.py` has the types of `LLM.beam_search`. The worker has no half of it: each beam is a sequence that reports its
most likely tokens.
"""
