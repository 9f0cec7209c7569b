"""Other people's data: where it is, in what format, in what form, and what of it can be learnt from."""

from rlhf_core.data.reading.forms import Role
from rlhf_core.data.reading.messages import NotShown
from rlhf_core.data.reading.places import Access
from rlhf_core.data.reading.reader import ReadSet, SourceFacts, read_set
from rlhf_core.data.reading.rows import RejectedRow
from rlhf_core.data.reading.sources import at_fault, detect_role, possible_roles

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
