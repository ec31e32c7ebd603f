"""Requests that are answered with vectors, labels and scores instead of text."""
