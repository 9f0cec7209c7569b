"""Which of torchrun's processes this is; reads its environment, and imports no torch."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path


def launched_rank() -> int:
    """Return this process's rank under torchrun; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def launched_ranks() -> int:
    """Return the number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def tell_launcher(sentence: str) -> None:
    """Write the cause of this process's end where torchrun looks for it, so that its report ends with the cause.

    Without that file it says only that there is no traceback, and that below one of its own. Nothing happens without
    torchrun, or where the file cannot be written: the sentence was said.
    """
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not place:
        return
    # The form that torch.distributed.elastic writes itself; a line of its own is read more easily in the report.
    facts = {"py_callstack": f"\n{sentence}", "timestamp": str(int(time.time()))}
    with suppress(OSError):
        Path(place).write_text(json.dumps({"message": {"message": sentence, "extraInfo": facts}}), encoding="utf-8")
