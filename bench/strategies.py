"""Bytes per rank and step time of every strategy, against plain and DDP in the same run; one JSON line.

    python bench/strategies.py [--ranks 2] [--rounds 5] [--steps 2] [--rows 8] [--tokens 256] [--precisions fp32,bf16]
        [--strategies zero2,3d-tp2]

A Llama of 30 million weights on ranks over gloo, a thread each, and plain on one rank with all of the rows; `3d-tp2`
cuts matrices into two parts, `3d-pp2` layers, `3d-sp2` rows. Four ranks share two cores or have their own, which the
line tells: `cores`. The ranks of all strategies stay, and take steps in turns, in another order in each round, so that
what else the machine does meets all of them. `held_mb` is counted from the tensors that a rank has (`weights` with the
float32 masters), and stands beside the formula's; `resident_mb` is what its process grew by, activations and buffers
included. Ratios are medians of the rounds' own, by the clock and, as `cpu`, by how long a rank's processor was busy,
which tells the work where a machine does much else. `zero2_to_ddp` is held to at most 1.10.

It fails if a number is missing; not if one is larger than it should be.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rlhf_core.models.memory import bytes_per_rank
from tests.parallel.ranks import Found, RankSet
from tests.parallel.strategy_stages import named

CASES = "bench.strategy_runs.on_ranks"
TURN_S = 600.0
"""Longest turn, on a machine that does much else."""
LIMIT = 1.10
"""Of ZeRO-2's step to DDP's, on two ranks both."""


class Contender(NamedTuple):
    """A strategy, with the parts that it cuts a model into, on a number of ranks."""

    strategy: str
    ranks: int

    @property
    def name(self) -> str:
        """What it is called in the line."""
        return self.strategy if self.ranks > 1 else f"{self.strategy}_alone"


CONTENDERS = {
    2: ("plain", "ddp", "zero2", "gemini", "3d-tp2", "3d-pp2"),
    4: ("plain", "ddp", "3d-tp2-pp2"),
}
"""By the number of ranks: 13 processes, which 24 GB have room for."""


def arguments() -> argparse.Namespace:
    """Return the command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=CONTENDERS, help="of each strategy")
    parser.add_argument("--rounds", type=int, default=5, help="of each strategy's turn; medians are reported")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--rows", type=int, default=8, help="of a step, on all ranks together")
    parser.add_argument("--tokens", type=int, default=256, help="of a row")
    parser.add_argument("--strategies", help="those beside plain and ddp, with commas between them")
    parser.add_argument("--precisions", default="fp32,bf16", help="with commas between them")
    return parser.parse_args()


def measure(precision: str, given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the figures of all strategies in one precision."""
    others = given.strategies.split(",") if given.strategies else CONTENDERS[given.ranks]
    strategies = dict.fromkeys(("plain", "ddp", *others))
    contenders = (Contender("plain", 1), *(Contender(strategy, given.ranks) for strategy in strategies))
    standing: dict[Contender, RankSet] = {}
    figures: dict[str, Any] = {}
    times: dict[str, dict[str, list[float]]] = {contender.name: {"step_s": [], "cpu_s": []} for contender in contenders}
    try:
        for contender in contenders:
            standing[contender] = RankSet(contender.ranks)
            case = f"prepare:{contender.strategy}:{precision}:{given.rows}:{given.tokens}"
            figures[contender.name] = held(contender, precision, told(standing[contender], case, directory))
        for number in range(given.rounds):
            turn = number % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                found = told(standing[contender], f"steps:{given.steps}", directory)
                for kind, seconds in times[contender.name].items():
                    seconds.append(max(each[kind] for each in found))
            sys.stderr.write(f"{precision}, round {number + 1} of {given.rounds}: {last(times)}\n")
    finally:
        for ranks in standing.values():
            ranks.end()
    for name, own in times.items():
        figures[name] |= {
            "step_s": round(median(own["step_s"]), 3),
            "spread_s": [round(min(own["step_s"]), 3), round(max(own["step_s"]), 3)],
            "cpu_s": round(median(own["cpu_s"]), 3),
            "to_plain": ratio(own, times["plain"]),
            "to_ddp": ratio(own, times["ddp"]),
        }
    return figures


def told(ranks: RankSet, case: str, directory: Path) -> list[dict[str, float]]:
    """Return the numbers of each rank; end with their sentence if they have none."""
    found: list[Found] = ranks.run(CASES, case, directory, limit_s=TURN_S)
    for each in found:
        if each.sentence or not all(map(math.isfinite, each.numbers.values())):
            raise SystemExit(f"{case}: {each.sentence or each.numbers}")
    return [each.numbers for each in found]


def held(contender: Contender, precision: str, ranks: list[dict[str, float]]) -> dict[str, Any]:
    """Return megabytes of the rank that holds most, counted and by the formula."""
    parameters = int(ranks[0]["parameters"])
    strategy, parts = named(contender.strategy)
    needed = bytes_per_rank(
        strategy,  # type: ignore[arg-type]
        parameters=parameters,
        trained=parameters,
        world_size=contender.ranks,
        precision=precision,  # type: ignore[arg-type]
        parts=parts,
    )
    formula = {"weights": needed.weights + needed.master, "gradients": needed.gradients, "moments": needed.moments}
    return {
        "ranks": contender.ranks,
        "held_mb": {name: round(max(rank[name] for rank in ranks) / 1e6, 1) for name in formula},
        "formula_mb": {name: round(size / 1e6, 1) for name, size in formula.items()},
        "resident_mb": round(max(rank["resident"] for rank in ranks) / 1e6),
    }


def ratio(own: dict[str, list[float]], others: dict[str, list[float]]) -> dict[str, float]:
    """Return the median and the ends of the rounds' ratios, and the median of those of the processor's time."""
    clock, cpu = (
        [mine / other for mine, other in zip(own[kind], others[kind], strict=True)] for kind in ("step_s", "cpu_s")
    )
    found = {"median": median(clock), "least": min(clock), "most": max(clock), "cpu": median(cpu)}
    return {name: round(value, 3) for name, value in found.items()}


def last(times: dict[str, dict[str, list[float]]]) -> str:
    """Return the seconds of a round in words."""
    return ", ".join(f"{name} {own['step_s'][-1]:.2f} s ({own['cpu_s'][-1]:.2f})" for name, own in times.items())


def main() -> int:
    """Measure and print the line."""
    given = arguments()
    line: dict[str, Any] = {"bench": "strategies", "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    line |= {"ranks": given.ranks, "threads_per_rank": 1, "rows": given.rows, "tokens": given.tokens}
    with tempfile.TemporaryDirectory() as directory:
        for precision in given.precisions.split(","):
            line[precision] = measure(precision, given, Path(directory))
    line["zero2_to_ddp"] = {"limit": LIMIT} | {
        precision: line[precision]["zero2"]["to_ddp"]
        for precision in given.precisions.split(",")
        if "zero2" in line[precision]
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
