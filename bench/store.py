"""The artifact store against plain transfers, and how it grows; one JSON line.

    python bench/store.py [--megabytes 1000] [--rounds 5] [--most 10000] [--only transfer,second,pause,scale]

On a SeaweedFS of its own. `transfer`: commit and fetch of a model's directory (hashed, written under a lease, checked
by the server, checked again as it is read), against `s3fs.put` and `get` and boto3's multipart transfers of the same
bytes in the same round, each round on an empty server and in another order; the ratio is to the better of the two.
`second`: what the second of two versions sends that share nine tenths. `pause`: how long the learner stands still for
a training state, against a plain copy of as many bytes. `scale`: listing, resolving and lineage by number of versions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.storage import pause, scale, transfer
from tests.integration.seaweed import run_seaweed

PARTS = ("transfer", "second", "pause", "scale")


def arguments() -> argparse.Namespace:
    """Return the command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="of the directory that is sent")
    parser.add_argument("--rounds", type=int, default=5, help="of each comparison; medians are reported")
    parser.add_argument("--most", type=int, default=10_000, help="versions")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    return parser.parse_args()


def transfers(megabytes: int, rounds: int) -> dict[str, Any]:
    """Return how fast each way is, there and back."""
    found: list[dict[str, dict[str, float]]] = []
    for number in range(rounds):
        with run_seaweed() as server, tempfile.TemporaryDirectory() as directory:
            found.append(transfer.compare(server, Path(directory), megabytes, number))
            sys.stderr.write(f"round {number + 1} of {rounds}: {json.dumps(found[-1])}\n")
    return {what: transfer.summary([rates[what] for rates in found]) for what in ("send", "get")}


def main() -> int:
    """Measure and print the line."""
    given = arguments()
    parts = given.only.split(",")
    line: dict[str, Any] = {"bench": "store", "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    line["megabytes"] = given.megabytes
    if "transfer" in parts:
        line["transfer"] = transfers(given.megabytes, given.rounds)
    if "second" in parts:
        with run_seaweed() as server, tempfile.TemporaryDirectory() as directory:
            line["second"] = transfer.second_version(server, Path(directory), given.megabytes)
    if "pause" in parts:
        line["pause"] = pause.measure()
    if "scale" in parts:
        with run_seaweed() as server, tempfile.TemporaryDirectory() as directory:
            line["scale"] = scale.measure(server, Path(directory), given.most)
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
