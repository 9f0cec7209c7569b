"""Prompts in, sampled or greedy responses out."""

from rlhf_core.generation.engine import Generation, generate
from rlhf_core.generation.sampling import choose_greedy, choose_sampled, sample_uniforms

__all__ = ["Generation", "choose_greedy", "choose_sampled", "generate", "sample_uniforms"]
