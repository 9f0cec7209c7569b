"""Into how many parts strategy 3d cuts one model."""

from __future__ import annotations

from typing import Literal, NamedTuple

SequenceMode = Literal["all_to_all", "split_gather"]


class Parts(NamedTuple):
    """The processes that hold one model together, by what each of them has of it."""

    tp: int = 1
    """Parts of every matrix (tensor parallelism)."""
    pp: int = 1
    """Stages, each of which has some layers (pipeline parallelism)."""
    sp: int = 1
    """Parts of every row's tokens, between attention and attention (sequence parallelism)."""
    sp_mode: SequenceMode = "all_to_all"
    """all_to_all: sp times as many processes, with the same weights, each of which attends by some heads; split_gather:
    those that have the parts of matrices also have the parts of rows, and `sp` is `tp`."""

    @property
    def number(self) -> int:
        """Processes that hold one model together."""
        return self.tp * self.pp * self.copies

    @property
    def copies(self) -> int:
        """Processes that have the same weights, and other tokens."""
        return self.sp if self.sp_mode == "all_to_all" else 1

    @property
    def sizes(self) -> dict[str, int]:
        """Those that are not 1."""
        return {name: size for name in ("tp", "pp", "sp") if (size := getattr(self, name)) > 1}

    @property
    def fault(self) -> str:
        """What excludes what, in a sentence; empty if nothing does."""
        if self.sp_mode == "split_gather" and self.sp not in {1, self.tp}:
            return (
                f"sp is {self.sp}, but split_gather cuts rows over the {self.tp} that have the parts of matrices; set "
                "sp to tp, or sp_mode to all_to_all"
            )
        return ""

    def __str__(self) -> str:
        """Return what is not 1: `tp 2 x pp 2`."""
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items()) or "one part"


WHOLE = Parts()
