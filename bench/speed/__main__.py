"""How fast the parts of a run are; one JSON line per row.

    python -m bench.speed [NAME...] [--tiny | --large] [--rounds N]

    value      ours, the least of N turns; peer_value, the peer's in the same turns
    limit      a floor from the same run, of which the settings say what it is
    ratio      peer_value / value
    goal, met  a goal that is missed is no failure

Exits 1 if a row is not there, raised, or has no goal, or no value of the peer that it names. TRL_PATH names a directory
with TRL in it, which is kept out of the lock:

    pip install --no-deps --target SOMEWHERE trl==1.12.0
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.speed.measure import Row, Run, is_complete, line_of
from bench.speed.rows import ROWS


def main(arguments: Sequence[str] | None = None, *, rows: Sequence[Row] = ROWS) -> int:
    """Measure rows, print their lines, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows to measure; none takes all")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--tiny", action="store_true", help="a tiny model and small numbers: shows that rows work")
    model.add_argument("--large", action="store_true", help="a Llama of a billion random weights, for GPUs")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each call, of which the least counts")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"expected at least one of --rounds, got {given.rounds}")
    known = {row.name: row for row in rows}
    lines = []
    for name in given.names or known:
        lines.append(_line(name, known, Run(given.tiny, given.rounds, given.large)))
        sys.stdout.write(json.dumps(lines[-1]) + "\n")
        sys.stdout.flush()
    return 0 if all(map(is_complete, lines)) else 1


def _line(name: str, known: Mapping[str, Row], run: Run) -> dict[str, Any]:
    if name in known:
        return line_of(known[name], run)
    return {"name": name, "goal": None, "error": f"there is no such row; there are {', '.join(known)}"}


if __name__ == "__main__":
    sys.exit(main())
