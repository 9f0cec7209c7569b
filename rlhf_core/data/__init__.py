"""Prompts, answers, preferences, and who judges them."""
