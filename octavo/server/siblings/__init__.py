"""Several API processes of one server: shared state and communication."""
