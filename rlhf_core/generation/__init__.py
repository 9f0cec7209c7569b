"""Prompts in, sampled or greedy responses out."""

from rlhf_core.generation.engine import make_engine, notes_suffice
from rlhf_core.generation.sampling import choose_greedy, choose_sampled, sample_uniforms
from rlhf_core.generation.settings import Generation, GenerationEngine, GenerationSettings

__all__ = [
    "Generation",
    "GenerationEngine",
    "GenerationSettings",
    "choose_greedy",
    "choose_sampled",
    "make_engine",
    "notes_suffice",
    "sample_uniforms",
]
