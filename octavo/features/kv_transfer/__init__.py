"""KV blocks from other servers: prompts are computed by one server (prefill), and answers decoded by another.

`text.py` reads `kv_transfer_params`, `asking.py` has prefill servers compute prompts, `engine.py` decides what is
offered and fetched, and `worker.py` sends (`listener.py`) and fetches (`fetching.py`) pages over TCP.
"""
