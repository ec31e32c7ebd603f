"""Embeddings, labels and scores: requests for vectors, and what is made of the results."""
