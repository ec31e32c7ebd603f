"""The one place that states Octavo's version."""

__version__ = "0.1.0"
