"""Sources that grow: what has arrived, what of it was known before, and what a night learns and leaves."""

from rlhf_core.data.arriving.found import FoundFile, files_of, role_of_arrivals
from rlhf_core.data.arriving.joining import ARRIVED, LEARNING, Tonight, as_set, count_waiting, join, settle_rows
from rlhf_core.data.arriving.ledger import KnownFile, Ledger, PastNight, RowMarks, rows_from_jsonl, rows_to_jsonl
from rlhf_core.data.arriving.reading import ARRIVING, Arrived, is_anything_new, read_new, refuse_too_many_bad

__all__ = [
    "ARRIVED",
    "ARRIVING",
    "LEARNING",
    "Arrived",
    "FoundFile",
    "KnownFile",
    "Ledger",
    "PastNight",
    "RowMarks",
    "Tonight",
    "as_set",
    "count_waiting",
    "files_of",
    "is_anything_new",
    "join",
    "read_new",
    "refuse_too_many_bad",
    "role_of_arrivals",
    "rows_from_jsonl",
    "rows_to_jsonl",
    "settle_rows",
]
