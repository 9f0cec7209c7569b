"""Other people's data: where it is, in what format, in what form, and what of it can be learnt from."""

from rlhf_core.data.reading.reader import read_set
from rlhf_core.data.reading.results import Access, NotShown, ReadSet, RejectedRow, Role, SourceFacts
from rlhf_core.data.reading.roles import detect_role, possible_roles
from rlhf_core.data.reading.source_rows import at_fault

__all__ = [
    "Access",
    "NotShown",
    "ReadSet",
    "RejectedRow",
    "Role",
    "SourceFacts",
    "at_fault",
    "detect_role",
    "possible_roles",
    "read_set",
]
