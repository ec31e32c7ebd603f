"""Settings from the command line, config files and environment variables."""
