"""When a policy replaces the champion, so that a year of nights promotes no chance: exact tests, and their budget."""

from rlhf_core.gating.budget import Comparison, levels
from rlhf_core.gating.paired_test import Tally, improvement_p, least_gain_shown, sign_test, tally
from rlhf_core.gating.power import chance_to_pass, fewest_problems, power, smallest_gain
from rlhf_core.gating.verdict import Contender, Verdict, judge, level_of_each

__all__ = [
    "Comparison",
    "Contender",
    "Tally",
    "Verdict",
    "chance_to_pass",
    "fewest_problems",
    "improvement_p",
    "judge",
    "least_gain_shown",
    "level_of_each",
    "levels",
    "power",
    "sign_test",
    "smallest_gain",
    "tally",
]
