"""The server process: address, signals, keys, logs, start and shutdown."""
