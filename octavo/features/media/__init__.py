"""Images in prompts.

`text.py` reads images (`read.py`, `fetch.py`, `decode.py`) and turns them into pixels and placeholders (`processors/`).
`engine.py` has them encoded before the tokens around them are computed. `worker.py` encodes them (`towers/`), keeps the
results, and overwrites the placeholders' embeddings with them. The placeholders' keys are digests of the pixels, so
that only equal images share KV.
"""
