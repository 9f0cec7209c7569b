"""Into how many parts strategy 3d cuts one model."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

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
    def gathers(self) -> bool:
        """Whether those that have the parts of matrices have the parts of rows."""
        return self.sp > 1 and self.sp_mode == "split_gather"

    @property
    def copies(self) -> int:
        """Processes that have the same weights, and other tokens."""
        return 1 if self.gathers else self.sp

    @property
    def sizes(self) -> dict[str, int]:
        """Those that are not 1."""
        return {name: size for name in ("tp", "pp", "sp") if (size := getattr(self, name)) > 1}

    @property
    def fault(self) -> str:
        """What excludes what, in a sentence; empty if nothing does."""
        if self.sp_mode not in get_args(SequenceMode):
            return f"sp_mode {self.sp_mode} is not supported; take {' or '.join(get_args(SequenceMode))}"
        if self.gathers and self.sp != self.tp:
            return (
                f"sp is {self.sp}, but split_gather cuts rows over the {self.tp} that have the parts of matrices; set "
                "sp to tp, or sp_mode to all_to_all"
            )
        return ""

    def __str__(self) -> str:
        """Return the sizes that multiply: `tp 2 x pp 2`."""
        sizes = self.sizes | ({} if self.copies > 1 else {"sp": 1})
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one part"


WHOLE = Parts()
