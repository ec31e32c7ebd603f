"""Models that read a whole text at once, in both directions, and make vectors or labels of it."""
