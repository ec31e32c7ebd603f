"""The engine's scheduler and KV cache with a virtual clock, and a model of step times in place of a device."""
