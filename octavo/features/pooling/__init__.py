"""Pooling: requests that end with their prompt, of whose hidden states a vector is made.

`engine.py` tells the worker half which of a step's rows are such, `worker.py` makes the vectors: of whole prompts or of
prompts that come in chunks, of encoders and decoders alike.
"""
