"""Prompts: every form in which one may be given, made into a request that the engine can take."""
