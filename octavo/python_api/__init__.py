"""The Python API in vLLM's form: `LLM`, `AsyncLLM`, `LLMEngine` and their arguments. `octavo` re-exports the names."""
