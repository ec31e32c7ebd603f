"""Settings as they are given: on the command line, in a config file, by variables."""
