"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): one model, many adapters, each request with its own."""
