"""`api_server`."""
