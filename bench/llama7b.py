"""`ppo/llama7b` at its size, on the stack that is up: memory, disk, time, bytes, and a kill; one JSON line.

    rlhf up && python bench/llama7b.py DIR [--samples 16] [--tokens 32] [--no-kill] [--chain]

DIR gets a model of Llama-2 7B's form with random weights and a tokenizer, unless it is there: 13.5 GB. Then this is
typed, with 2 episodes of `samples` samples of about 32 + `tokens` tokens:

    prefect deployment run ppo/llama7b --watch -p model=DIR -p episodes=2 -p overrides=...

It is typed again with another time limit, which changes the run's key and no number, and its trainer is killed with
SIGKILL in the second episode: the policy must be the same to the bit. `--chain` runs `pipeline/llama7b` too, with a few
steps in each stage.

    own        anonymous memory of a process and dirty pages that it alone has
    pss        proportional set size: what is shared counts once, over all processes of the stack and the run
    read       from all disks, after the first episode began to collect
    published  weights that lay in shared memory for the makers, at most: of two versions at once
    estimated  what preflight and the check of the data's lengths ask for
    kept       what the first run, and then the pipeline's, left in RLHF_HOME, the base's copy apart

Exits 1 if a limit is missed. They hold for 16 samples of 32 + 32 tokens on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.llama.model import SUMS, estimated, make_model
from flows.presets import resolve
from infra.artifacts import ArtifactStore, Manifest, open_default_store
from infra.process_record import is_live
from infra.services import prefect_api, processes
from infra.services.state import StackState
from infra.settings import CHECKOUT, settings

PRESET = "llama7b"
MOST_PSS, MOST_READ, MOST_DISK, MOST_PAUSE_S = 20e9, 1e9, 28e9, 10.0
MOST_EPISODE_S, MOST_EPISODE_WITH_AMX_S = 25 * 60.0, 8 * 60.0
FULL = (16, 32)
"""Samples and new tokens that an episode's limit is for."""
LONGEST_ANSWER = 32
"""Tokens of the held-out answers, at most."""
LOOK_S = 5.0
LONGEST_EPISODE_S = 4 * 3600.0
LONGEST_SWEEP_S = 180.0
"""Until the store has given back the room of what was deleted."""
LABEL = "rlhf-weights-"
"""Of memory that holds published weights."""
NAMED_MB = 50
"""Processes that have more to themselves are named."""


# --- what is measured


@dataclass
class Moment:
    """What the machine held at one time, in bytes."""

    at: float
    pss: dict[str, int]
    own: dict[str, int]
    shared: dict[str, int]
    """Mapped pages that are not a process's own."""
    read: int
    """From disks, since the machine started."""
    swapped: int
    """To disk, since the machine started."""
    published: int
    """In memory that trainer and makers share."""

    @property
    def total(self) -> int:
        """Return the bytes of all processes together."""
        return sum(self.pss.values())


@dataclass
class Watcher:
    """Looks at all processes of the stack and the run, as long as the block lasts."""

    stack_id: str
    moments: list[Moment] = field(default_factory=list)

    def __enter__(self) -> Watcher:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.moments.append(self._look())

    def _look(self) -> Moment:
        pss, own, shared, published = {}, {}, {}, {}
        for each in processes.marked(self.stack_id):
            try:
                known, name = _rollup(each.pid), f"{_what(each)} {each.pid}"
                published |= _published(each.pid)
            except (psutil.Error, OSError, ValueError):  # it has just ended
                continue
            pss[name] = known["Pss"]
            own[name] = max(known["Anonymous"], known["Private_Dirty"])  # anonymous pages are dirty
            shared[name] = known["Rss"] - known["Anonymous"]
        counts = _facts(Path("/proc/vmstat"))
        return Moment(
            time.time(), pss, own, shared, 1024 * counts["pgpgin"], 4096 * counts["pswpout"], sum(published.values())
        )

    @property
    def peak(self) -> Moment:
        """Return the moment with the most memory."""
        return max(self.moments, key=lambda moment: moment.total)

    def read_since(self, at: float) -> int:
        """Return the bytes read from disks from a time on."""
        later = [moment.read for moment in self.moments if moment.at >= at]
        return later[-1] - later[0] if later else 0


def _what(process: psutil.Process) -> str:
    """Return what a process is, in a word or two."""
    words = process.cmdline()
    module = words.index("-m") + 1 if "-m" in words else 0
    return " ".join(words[module : module + 2]) if module else process.name()


def _rollup(pid: int) -> dict[str, int]:
    return {name: 1024 * size for name, size in _facts(Path(f"/proc/{pid}/smaps_rollup")).items()}


def _published(pid: int) -> dict[int, int]:
    """Return the bytes of the files without a name that a process has open, by inode."""
    open_files = Path(f"/proc/{pid}/fd").iterdir()
    found = [file.stat() for file in open_files if os.readlink(file).startswith(f"/memfd:{LABEL}")]
    return {each.st_ino: 512 * each.st_blocks for each in found}


def _facts(file: Path) -> dict[str, int]:
    """Return the numbers of a file of the kernel's with a name and a number in a line."""
    words = (line.replace(":", " ").split() for line in file.read_text().splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def on_disk(directory: Path) -> int:
    """Return the bytes that a directory takes, links to one file counted once."""
    found = {}
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                file = (Path(place) / name).lstat()
            except OSError:  # removed meanwhile
                continue
            found[file.st_ino] = 512 * file.st_blocks
    return sum(found.values())


def processor() -> dict[str, Any]:
    """Return what the processor is, and what it has that matters here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    known = dict(line.split(":", 1) for line in lines if ":" in line)
    known = {name.strip(): value.strip() for name, value in known.items()}
    flags = set(known.get("flags", "").split())
    kinds = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "name": known.get("model name", ""),
        "cores": psutil.cpu_count(),
        "has": [each for each in kinds if each in flags],
    }


# --- runs


def typed(deployment: str, model: Path, overrides: Mapping[str, Any], watcher: Watcher) -> Run:
    """Run a deployment as a user types it.

    Raises:
        SystemExit: if it does not end well.
    """
    command: list[str | Path] = [
        Path(sys.executable).with_name("prefect"), "deployment", "run", deployment, "--watch",
        "-p", f"model={model}", "-p", "episodes=2", "-p", f"overrides={json.dumps(overrides)}",
    ]  # fmt: skip
    begun, said = len(watcher.moments), ""
    run = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    for line in run.stdout:
        sys.stderr.write(line)
        said += line
    found = re.search(r"UUID: (\S+)", said)
    if run.wait() or found is None:
        raise SystemExit(f"{deployment} did not end well; look at its log")
    return Run(found[1], watcher.moments[begun:])


@dataclass(frozen=True)
class Run:
    """A flow run that ended well, and what the machine held meanwhile."""

    id: str
    moments: list[Moment]


def settings_of(samples: int, tokens: int, *, timeout_s: float) -> dict[str, Any]:
    """Return the overrides of a small run; `timeout_s` changes no number, but the run's key."""
    return {
        "name": PRESET,  # sums of its own would be another project
        "data.task_parameters": SUMS,
        "data.splits": {"sft": 64, "preferences": 64, "ppo": 2 * samples, "evaluation": 8},
        "ppo.prompts_per_episode": samples,
        "ppo.chunk_size": samples,
        "ppo.train_batch_size": samples,
        "ppo.max_new_tokens": tokens,
        "ppo.cluster.episode_timeout_s": LONGEST_EPISODE_S,
        "ppo.reward.timeout_s": timeout_s,
        "evaluation.max_new_tokens": max(tokens, LONGEST_ANSWER),
    }


def chain_settings(pairs: Path) -> dict[str, Any]:
    """Return what makes the other stages short; a random model is never right, so the pairs are given."""
    rows = [{"prompt": f"Sort {n} and 1", "chosen": f"1, {n}", "rejected": f"{n}, 1"} for n in range(2, 22)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "data.preferences": str(pairs),
        "sft.epochs": 1,
        "sft.batch_size": 16,
        "reward_model.epochs": 1,
        "reward_model.batch_size": 4,
        "ppo.reward": {"verifier": 1.0, "reward_model": 0.1},
    }


def kill_in_second_episode(
    store: ArtifactStore, stack_id: str, known: set[str], delay_s: float, struck: list[int]
) -> None:
    """Wait for the first state that is not known, kill the trainer a time later, and note its process in `struck`."""
    until = time.monotonic() + LONGEST_EPISODE_S
    while not any(each.uri not in known for each in store.list("ppo-state")) and time.monotonic() < until:
        time.sleep(LOOK_S)
    time.sleep(delay_s)
    for each in processes.marked(stack_id):
        if is_live(each) and each.name().startswith("ray::RunTrainer"):
            each.send_signal(signal.SIGKILL)
            struck.append(each.pid)


def seconds_of_tasks(api_url: str, run_id: str) -> dict[str, float]:
    """Return how long each task of a run and of its stages took, by name."""
    stages = {"flow_runs": {"parent_flow_run_id": {"any_": [run_id]}}}
    ids = [run_id, *(each["id"] for each in prefect_api.call(api_url, "POST", "/flow_runs/filter", stages))]
    wanted = {"flow_runs": {"id": {"any_": ids}}, "sort": "EXPECTED_START_TIME_ASC"}
    found = prefect_api.call(api_url, "POST", "/task_runs/filter", wanted)
    return {each["name"]: round(each["total_run_time"], 1) for each in found}


def weights_of(manifest: Manifest) -> dict[str, str]:
    """Return the hashes of a model's files of weights, by path."""
    return {each.path: each.sha256 for each in manifest.files if each.path.endswith(".safetensors")}


def processes_at(peak: Moment) -> dict[str, dict[str, int]]:
    """Return the megabytes of the larger processes, and of all others together."""
    named = [each for each in peak.own if peak.own[each] > NAMED_MB * 1e6]
    found = {
        each: {"own_mb": round(peak.own[each] / 1e6), "shared_mb": round(peak.shared[each] / 1e6)} for each in named
    }
    rest = sum(size for each, size in peak.own.items() if each not in named)
    return found | {f"{len(peak.own) - len(named)} others": {"own_mb": round(rest / 1e6), "shared_mb": 0}}


def played(
    model: Path, overrides: Mapping[str, Any], watcher: Watcher, store: ArtifactStore, *, kill_after_s: float | None
) -> tuple[Run, Manifest]:
    """Run PPO and return its run with its policy; if a time is given, its trainer is killed so long after episode 1.

    Raises:
        SystemExit: if it does not end well.
    """
    known, struck = {each.uri for each in store.list("ppo-state")}, list[int]()
    if kill_after_s is not None:
        waits = (store, watcher.stack_id, known, kill_after_s, struck)
        threading.Thread(target=kill_in_second_episode, args=waits, daemon=True).start()
    run = typed(f"ppo/{PRESET}", model, overrides, watcher)
    if kill_after_s is not None and not struck:
        raise SystemExit("the run was over before its trainer could be killed")
    return run, store.resolve(f"policy/{PRESET}")


def arguments() -> argparse.Namespace:
    """Return the command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the model, which is made unless it is there")
    parser.add_argument("--samples", type=int, default=FULL[0], help="of an episode")
    parser.add_argument("--tokens", type=int, default=FULL[1], help="of a response")
    parser.add_argument("--no-kill", action="store_true", help="do not run a second time, with a kill")
    parser.add_argument("--chain", action="store_true", help="also SFT, reward model and evaluation")
    return parser.parse_args()


def main() -> int:
    """Make the model, run, print the line; the exit status is 1 if a limit is missed."""
    given = arguments()
    directory = given.directory.resolve()
    if not directory.is_dir():
        make_model(directory)
    known, kind = settings(), processor()
    stack, store = StackState.load(known.home), open_default_store()
    api_url = f"{stack.services['server'].address}/api"

    def kept() -> int:
        return on_disk(known.home) - on_disk(known.models_dir)

    before = kept()  # the base's copy counts, though it may be there
    number = time.time() % 1000 / 1000
    with Watcher(stack.id) as watcher:
        overrides = settings_of(given.samples, given.tokens, timeout_s=10 + number)
        run, policy = played(directory, overrides, watcher, store, kill_after_s=None)
        state = store.latest("ppo-state", f"{PRESET}-{(policy.key or '')[:12]}")
        assert state is not None  # its policy was stored after it
        episodes = [record["seconds"] for record in store.read_json(state, "state.json")["history"]]
        lasted = [sum(each.values()) for each in episodes]
        collecting = run.moments[-1].at - sum(lasted)
        line: dict[str, Any] = {
            "bench": "llama7b", "samples": given.samples, "new_tokens": given.tokens, "processor": kind,
            "model_gb": round(on_disk(directory) / 1e9, 2), "tasks_s": seconds_of_tasks(api_url, run.id),
            "episodes_s": [{phase: round(value, 1) for phase, value in each.items()} for each in episodes],
            "policy_mb": round(policy.size / 1e6, 1),
            "kept_mb": round((kept() - before) / 1e6),
        }  # fmt: skip
        read = watcher.read_since(collecting)
        if not given.no_kill:
            overrides = settings_of(given.samples, given.tokens, timeout_s=20 + number)
            killed, again = played(directory, overrides, watcher, store, kill_after_s=lasted[-1] / 2)
            line["killed"] = {
                "tasks_s": seconds_of_tasks(api_url, killed.id),
                "same_bits": weights_of(again) == weights_of(policy),
            }
        if given.chain:
            before_chain = kept()
            pairs = known.home / "bench-pairs.jsonl"
            try:
                chain = typed(f"pipeline/{PRESET}", directory, overrides | chain_settings(pairs), watcher)
            finally:
                pairs.unlink(missing_ok=True)
            line["chain_tasks_s"] = seconds_of_tasks(api_url, chain.id)
            line["chain_kept_mb"] = round((kept() - before_chain) / 1e6)
    need = estimated(resolve(PRESET, overrides=overrides), directory, gpus=0)
    peak, swapped = watcher.peak, watcher.moments[-1].swapped - watcher.moments[0].swapped
    until = time.monotonic() + LONGEST_SWEEP_S
    while (disk := on_disk(known.home) - before + on_disk(directory)) > MOST_DISK and time.monotonic() < until:
        time.sleep(LOOK_S)
    line |= {
        "peak_pss_gb": round(peak.total / 1e9, 2), "at_peak": processes_at(peak), "read_gb": round(read / 1e9, 2),
        "published_mb": round(max(moment.published for moment in watcher.moments) / 1e6),
        "estimated_gb": round((need.held + need.passes + need.programs) / 1e9, 2),
        "swapped_mb": round(swapped / 1e6), "disk_gb": round(disk / 1e9, 2),
    }  # fmt: skip
    longest = MOST_EPISODE_WITH_AMX_S if "amx_bf16" in kind["has"] else MOST_EPISODE_S
    limits = {
        "peak": peak.total <= MOST_PSS,
        "read": read <= MOST_READ,
        "swapped": swapped == 0,
        "disk": disk <= MOST_DISK,
        "episode": max(lasted) <= longest,
        "pause": max(each["commit"] for each in episodes) <= MOST_PAUSE_S,
        "killed": given.no_kill or line["killed"]["same_bits"],
    }
    line["missed"] = [name for name, is_met in limits.items() if not is_met]
    sys.stdout.write(json.dumps(line) + "\n")
    return 1 if line["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
