"""The engine in a Python program: `LLM`, `AsyncLLM`, `LLMEngine` and what they take; `octavo` has their names."""
