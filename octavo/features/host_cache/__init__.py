"""Keeps KV blocks in the host's memory or in files, where they outlast their eviction from the device's.

`engine.py` decides what is kept (`index.py`); `worker.py` has the store of each rank (`stores.py`, `files.py`).
"""
