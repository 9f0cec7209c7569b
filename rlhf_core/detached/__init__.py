"""Ray shells around the core."""
