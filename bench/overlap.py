"""How busy trainer and makers keep each other, in lockstep and with staleness 1; one JSON line.

    python bench/overlap.py [--picture docs/pictures/overlap.png]

Real actors of the `ppo` flow on a leased cluster, one trainer and two makers, all as fast: an episode is learnt in
about the time in which the makers make its four chunks. The model is tiny and each chunk and step is stretched to a
fixed time by sleeping, so that the machine's other work changes little; what the actors do between chunks and steps
(weights, counts, snapshots, calls of Ray) is as it is. Shares are means over warm episodes: neither the first two, nor
the last, beside which makers have nothing left to begin.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("RAY_worker_niceness", "0")
from rlhf_core.ppo.state import EpisodeRecord
from tasks.pictures.style import COLOURS, FAINT, INK, SMALL, dress, new_figure, png
from tests.integration.rollout_runs import CHUNKS, STEPS, cluster, config, rollout_run

CHUNK_S, STEP_S = 3.0, 1.0
"""Four chunks by two makers, and six steps: six seconds each."""
EPISODES = 6
SHARES = ("idle_trainer", "idle_makers", "staleness", "queue_depth")


def warm(records: list[EpisodeRecord]) -> list[EpisodeRecord]:
    """Return the episodes that are measured."""
    return records[2:-1]


def play(max_staleness: int, directory: Path) -> list[EpisodeRecord]:
    """Run all episodes."""
    settings = config(episodes=EPISODES, max_staleness=max_staleness, cluster={"num_makers": 2})
    with rollout_run(settings, directory, chunk_s=CHUNK_S, step_s=STEP_S) as run:
        return run.run()


def figures(records: list[EpisodeRecord]) -> dict[str, float]:
    """Return the means over warm episodes."""
    rows = [record.as_row() for record in warm(records)]
    found = {name: round(fmean(row[name] for row in rows), 4) for name in SHARES}
    seconds = [sum(record.seconds.values()) for record in warm(records)]
    return found | {"episode_s": round(fmean(seconds), 3)}


def spans(file: Path) -> list[dict[str, Any]]:
    """Return what was done when."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def draw(found: dict[str, tuple[Path, dict[str, float]]]) -> bytes:
    """Return the picture of who was at work when, of each run."""
    figure = new_figure(2.1 * len(found) + 0.2)
    every = figure.subplots(len(found), 1, squeeze=False).ravel()
    for axes, (title, (directory, shares)) in zip(every, found.items(), strict=True):
        steps = spans(directory / STEPS)
        lines = [("trainer", steps)] + [
            (f"maker {number}", spans(file)) for number, file in enumerate(sorted(directory.glob(f"{CHUNKS}-*")))
        ]
        begin = min(span["from"] for _, each in lines for span in each)
        for row, (_, each) in enumerate(lines):
            for number, span in enumerate(each):
                episode = span.get("episode", number * EPISODES // len(steps))
                axes.barh(
                    row, span["to"] - span["from"], left=span["from"] - begin, height=0.62,
                    color=COLOURS[episode % len(COLOURS)], edgecolor="white", linewidth=0.6,
                )  # fmt: skip
        idle = f"trainer idle {shares['idle_trainer']:.0%}, makers idle {shares['idle_makers']:.0%} of warm episodes"
        dress(axes, title=f"{title}: {idle}", x="seconds", y="")
        axes.set_yticks(range(len(lines)), [name for name, _ in lines], fontsize=SMALL, color=INK)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=FAINT, linewidth=0.6)
    width = max(axes.get_xlim()[1] for axes in every)
    for axes in every:
        axes.set_xlim(0, width)
    return png(figure)


def main() -> None:
    """Play both, and say how busy they were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, help="where the picture goes")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder) / "cluster"):
        played = {}
        for title, staleness in (("Lockstep", 0), ("Staleness 1", 1)):
            directory = Path(folder) / str(staleness)
            played[title] = (directory, figures(play(staleness, directory)))
        if asked.picture is not None:
            asked.picture.write_bytes(draw(played))
    lockstep, overlapped = (shares for _, shares in played.values())
    print(  # noqa: T201 - the benchmark's line
        json.dumps({"bench": "overlap", "chunk_s": CHUNK_S, "lockstep": lockstep, "staleness_1": overlapped})
    )


if __name__ == "__main__":
    main()
