"""Llama-2 7B with random weights, and what it takes on a GPU."""
