"""Several models behind one address: each in a server process of its own, behind a front process that routes."""
