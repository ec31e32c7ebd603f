"""Heads that draft from a model's hidden states (EAGLE): the module, and its training."""
