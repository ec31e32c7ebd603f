"""Prompt embeddings supplied by clients.

`text.py` reads and checks them, `engine.py` selects those of a step, `worker.py` overwrites the model's own with them.
The prompt has placeholder token ids at their positions, and digests as keys, so that only equal embeddings share KV.
"""
