"""Pooling: requests that end with their prompt, whose hidden states are made into a vector.

`engine.py` marks their rows in each step, `worker.py` makes the vectors: of whole prompts or of prompts that come in
chunks, for encoders and decoders alike. `requests.py` and `scoring.py` prepare requests, `http/` has the routes,
`offline.py` and `online.py` the methods of `LLM` and `AsyncLLM`; `checkpoint.py` reads how a model makes its vectors.
"""
