"""What adapts ColossalAI 0.5.0 to current releases and to machines without a GPU: each patch with its reason.

`upstream` is the only way to its modules. What is patched because there is no GPU stays as it is where there is one.
"""

from __future__ import annotations

from rlhf_core.strategy.colossal.compat.loading import upstream

__all__ = ["upstream"]
