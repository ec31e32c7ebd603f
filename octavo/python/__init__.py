"""The Python API: `LLM`, `AsyncLLM`, `LLMEngine` and their arguments. `octavo` re-exports the names."""
