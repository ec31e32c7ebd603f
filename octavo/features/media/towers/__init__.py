"""Vision towers and projectors: from pixels to embeddings, one file for each kind of model."""
