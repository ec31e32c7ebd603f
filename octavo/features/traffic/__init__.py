"""A record of what arrived, without texts and token ids, for `octavo simulate` and `octavo tune`.

The engine half writes a `TraceLine` (`core/trace.py`) at the end of each request.
"""
