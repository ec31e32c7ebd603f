"""The Decisions API: questions about an input, answered by the model's probability of each given answer."""
