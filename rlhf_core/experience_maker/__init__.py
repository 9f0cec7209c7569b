"""Prompts in, Experience out."""
