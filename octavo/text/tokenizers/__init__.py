"""Tokenizers, from Hugging Face's files or from a GGUF file, and a placeholder for models without one."""
