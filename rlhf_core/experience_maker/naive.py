"""coati's name for the maker."""

from __future__ import annotations

from rlhf_core.experience_maker.maker import ExperienceMaker


class NaiveExperienceMaker(ExperienceMaker):
    """Stands where coati's class stands."""
