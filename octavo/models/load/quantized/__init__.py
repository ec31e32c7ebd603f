"""Checkpoints with quantized weights in safetensors files: one module for each method that publishes them."""
