"""Holds Experience between collecting and learning."""
