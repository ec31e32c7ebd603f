"""Writing checkpoints: `folder.quantize` rounds a model's matrices and writes them as compressed-tensors."""
