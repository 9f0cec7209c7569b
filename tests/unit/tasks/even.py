"""A verifier of one's own, in a module that imports nothing."""


def letters(prompt: str, response: str, answer: str) -> float:  # noqa: ARG001 - as a verifier is called
    """Return 1 for an even number of letters."""
    return float(len(response) % 2 == 0)
