"""Embeddings in prompts, given by clients.

`text.py` reads and checks them, `engine.py` selects those that a step needs, `worker.py` puts them in place of the
model's own. The prompt has placeholder token ids there, and digests as keys, so that only equal embeddings share KV.
"""
