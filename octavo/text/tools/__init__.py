"""Tools as requests declare them, and how models write calls."""
