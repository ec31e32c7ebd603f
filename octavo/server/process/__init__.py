"""The server as a process: where it listens, its signals, keys and logs, its start and its end."""
