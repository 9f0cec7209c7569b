"""Sampling from a causal language model."""
