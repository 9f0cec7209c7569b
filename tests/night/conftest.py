"""What of this folder is not collected."""

from __future__ import annotations

collect_ignore = ["prefects_order.py", "stub.py", "without.py"]
"""What other processes import: it changes the process that imports it, and so would all other tests."""
