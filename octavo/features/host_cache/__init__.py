"""Keeps KV blocks in the host's memory, where they outlast their eviction from the device's.

`engine.py` decides what is kept (`index.py`); `worker.py` has the memory and copies pages.
"""
