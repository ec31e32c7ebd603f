"""Bidirectional models that convert a whole text to vectors or labels."""
