"""A linter of preferences, demonstrations, problems and prompts: faults that rows have although they can be read."""

from rlhf_core.data.linting.findings import Accused, Finding
from rlhf_core.data.linting.lint import Linted, lint_set, lint_sets
from rlhf_core.data.linting.rows import LintRow, LintSet

__all__ = ["Accused", "Finding", "LintRow", "LintSet", "Linted", "lint_set", "lint_sets"]
