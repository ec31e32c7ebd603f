"""The module path by which vLLM's users import `LoRARequest`."""
