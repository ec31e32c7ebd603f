"""The OpenAPI document: request bodies, and their parts that this server supports."""
