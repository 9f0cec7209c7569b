"""Loops and single steps."""
