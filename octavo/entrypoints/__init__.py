"""Modules at the paths where users of other servers start theirs."""
