"""Detokenization with stop strings, per choice."""
