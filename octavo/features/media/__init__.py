"""Images and audio in prompts.

`text.py` reads them (`read.py`, `parts.py`, `fetch.py`, `decode.py`, `audio/`) and turns them into pixels or
spectrograms, and placeholders (`processors/`). `engine.py` has them encoded before the tokens around them are computed.
`worker.py` encodes them (`towers/`), keeps the results, and overwrites the placeholders' embeddings with them. The
placeholders' keys are digests of what is encoded, so that only equal images or audio share KV. `transcription/` has the
routes of models that read audio.
"""
