"""Tools declared by requests, and the formats in which models write calls."""
