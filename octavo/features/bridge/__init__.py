"""Models without an implementation of Octavo's own, computed by the modules of `transformers`.

Octavo puts its attention, KV cache, linear layers and loader in place of theirs; see `models.py`.
"""
