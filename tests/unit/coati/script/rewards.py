"""A reward function as a user would write one."""

from __future__ import annotations


def length_of_prompt(prompt: str, response: str, answer: str | None) -> float:
    """Return something that tells whether the function was given the prompt."""
    del response, answer
    return float(len(prompt))
