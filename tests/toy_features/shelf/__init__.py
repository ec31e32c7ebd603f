"""Keeps pages of the KV cache in a dictionary, which all engines of a process share."""
