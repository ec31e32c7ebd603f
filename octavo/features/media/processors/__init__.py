"""From images to pixels and placeholders, one file for each kind of preprocessing; without torch."""
