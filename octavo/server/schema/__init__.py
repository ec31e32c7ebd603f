"""The OpenAPI document: request bodies, and what of them this server takes."""
