"""What consecutive training states share, and what a lossless difference would save; one JSON line.

    python bench/sharing.py [--episodes 6] [--only adapters,all_weights]

Real PPO episodes of SmolLM2-135M at the quickstart's settings, in one process, after some supervised steps on careless
demonstrations; the verifier alone judges. Each state goes into a store as a run's would, so the shards are a run's.
`shared`: bytes of blobs that the state before has already. `packed`: what is saved of the weights' and moments' bytes
by packing byte planes of the state alone, of its bits XOR the former's, and of the distance between both in steps of
the last bit. Two pairs of states: after the first two episodes, and after the last two.
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
from bench.storage import difference, episodes
from infra.artifacts import ArtifactStore, open_default_store
from rlhf_core.ppo.episode import Position
from rlhf_core.ppo.state import EpisodeRecord, TrainingState
from tasks.ppo_keeper import StoreKeeper
from tasks.results import Parent, PPORun

TRAINED = ("adapters", "all_weights")
DEMONSTRATIONS = 640
NOWHERE = Parent(uri="model/smollm2-135m-instruct", digest="0" * 64)


def arguments() -> argparse.Namespace:
    """Return the command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=6, help="of each run, at least 2")
    parser.add_argument("--only", default=",".join(TRAINED), help="what is trained, with commas between them")
    return parser.parse_args()


def measure(what: str, start: Path, count: int, directory: Path) -> dict[str, Any]:
    """Run the episodes, store their states, and return the figures of two pairs of them."""
    config = episodes.config_of(what)
    run = PPORun(
        name=what.replace("_", "-"), key="0" * 64, preset="quickstart", config=config,
        actor=NOWHERE, reward_model=None, dataset=NOWHERE, source_digest="", flow_run=None,
    )  # fmt: skip
    keeper, store = StoreKeeper(run), open_default_store()
    history: tuple[EpisodeRecord, ...] = ()
    figures: dict[str, Any] = {}
    for number, state in enumerate(episodes.states(start, config, count), start=1):
        right = sum(sample.verifier for sample in state.samples) / len(state.samples)
        history = (*history, EpisodeRecord(number - 1, number, "bench", {"verifier": right}, {}))
        place = Position(number, 0, number)
        keeper.commit_state(TrainingState(place, state.facts, None, state.tensors, history=history), state.samples)
        sys.stderr.write(f"{what}: episode {number} of {count}, {right:.2f} right\n")
        del state
        if number in {2, count}:
            figures[f"{number - 1}_to_{number}"] = _pair(store, run.name, number, directory)
    return figures


def _pair(store: ArtifactStore, name: str, version: int, directory: Path) -> dict[str, Any]:
    """Return the figures of a version and the one before it."""
    former, latter = (store.resolve(f"ppo-state/{name}@{number}") for number in (version - 1, version))
    places = [
        store.fetch(manifest.ref, directory / f"{name}-{version}-{which}", keep=False)
        for which, manifest in (("former", former), ("latter", latter))
    ]
    packed = difference.packed_shares(difference.read_pairs(*places))
    return difference.shared_bytes(former, latter) | {"packed": packed}


def main() -> int:
    """Measure and print the line."""
    given = arguments()
    line: dict[str, Any] = {"bench": "sharing", "load": round(os.getloadavg()[0], 1)}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ["RLHF_STORE_URL"] = f"file://{directory}/store"
        start = directory / "start"
        episodes.supervised_start(start, DEMONSTRATIONS)
        for what in given.only.split(","):
            line[what] = measure(what, start, given.episodes, directory)
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
