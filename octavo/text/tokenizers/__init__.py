"""Text to token ids, and what single ids stand for: from Hugging Face's files, from a GGUF file, or not at all."""
