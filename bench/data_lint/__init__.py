"""Planted faults, and what the linter finds of them."""
