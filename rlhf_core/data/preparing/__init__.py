"""From the sets that were read to each stage's problems and pairs, and a report on all of it."""

from rlhf_core.data.preparing.checking import Checked, Standard, check_rows, check_source, shared_prompts
from rlhf_core.data.preparing.lengths import TokenMeter
from rlhf_core.data.preparing.prepare import (
    ROLES,
    SOURCES,
    Prepared,
    prepare,
    read_sets,
    role_of,
    set_digests,
    sides_of,
    with_source,
)
from rlhf_core.data.preparing.report import DataReport, SetReport, describe_set, report_to_markdown
from rlhf_core.data.preparing.requirements import refuse_unfit

__all__ = [
    "ROLES",
    "SOURCES",
    "Checked",
    "DataReport",
    "Prepared",
    "SetReport",
    "Standard",
    "TokenMeter",
    "check_rows",
    "check_source",
    "describe_set",
    "prepare",
    "read_sets",
    "refuse_unfit",
    "report_to_markdown",
    "role_of",
    "set_digests",
    "shared_prompts",
    "sides_of",
    "with_source",
]
