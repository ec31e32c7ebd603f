"""Pooling: requests whose result is a vector, made of the prompt's hidden states.

`engine.py` marks their rows in each step, `worker.py` pools the hidden states of whole or chunked prompts, for encoders
and decoders. `requests.py` and `scoring.py` prepare requests, `http/` has the routes, `offline.py` and `online.py` the
methods of `LLM` and `AsyncLLM`; `checkpoint.py` reads a model's pooling configuration.
"""
