"""A flow of a second, for tests of the stack itself."""

from __future__ import annotations

import subprocess
import sys

from prefect import flow
from prefect.events import emit_event

from infra.settings import settings


@flow
def tiny(sleep_s: float = 0.0) -> str:
    """Return the store's address as a run sees it, after an event and a sleep in a process of its own."""
    emit_event("tiny.began", resource={"prefect.resource.id": "tiny"})  # goes by the socket that heartbeats go by
    if sleep_s:
        subprocess.run([sys.executable, "-c", f"import time; time.sleep({sleep_s})"], check=True)
    return f"{settings().store_url} {settings().s3_endpoint_url}"
