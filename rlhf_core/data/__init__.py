"""Prompts, answers, preferences, and who judges them."""

from rlhf_core.data.files import PreferenceFile, detect_form, read_preferences, read_problems
from rlhf_core.data.lengths import check_lengths
from rlhf_core.data.preferences import (
    PreferencePair,
    VerifiedSample,
    pairs_from_jsonl,
    pairs_from_samples,
    pairs_to_jsonl,
)
from rlhf_core.data.problems import (
    Problem,
    problem_key,
    problems_from_jsonl,
    problems_to_jsonl,
)
from rlhf_core.data.splits import assert_disjoint, load_problems
from rlhf_core.data.template import PromptTemplate
from rlhf_core.data.verifiers import Verdict, verify

__all__ = [
    "PreferenceFile",
    "PreferencePair",
    "Problem",
    "PromptTemplate",
    "Verdict",
    "VerifiedSample",
    "assert_disjoint",
    "check_lengths",
    "detect_form",
    "load_problems",
    "pairs_from_jsonl",
    "pairs_from_samples",
    "pairs_to_jsonl",
    "problem_key",
    "problems_from_jsonl",
    "problems_to_jsonl",
    "read_preferences",
    "read_problems",
    "verify",
]
