"""Labels of demonstrations, as transformers and coati write them."""

from __future__ import annotations

IGNORED = -100
"""The label of a token that no loss is taken of."""
