"""Embeddings in prompts, given by clients.

`engine.py` finds out which of them a step needs, `worker.py` puts them where the model's own would stand. The prompt's
token ids are placeholders there, and its keys digests, so that the KV cache is shared by equal embeddings alone.
"""
