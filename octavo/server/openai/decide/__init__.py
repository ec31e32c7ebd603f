"""The Decisions API: questions about an input, answered by how likely the model finds each of the given answers."""
