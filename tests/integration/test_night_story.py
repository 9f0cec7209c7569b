"""A week of nights with a tiny model: what a team meets, act by act, on one stack, each act after the one before.

Data arrive and a schedule begins; a night is killed twice; nothing is new; a file is bad; a policy wins the task and
loses all else; a champion is taken back; a budget ends nights, and the next one goes on.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.artifacts import ArtifactStore, Manifest
from infra.services import prefect_api
from infra.services.prefect_yaml import read_prefect_yaml
from infra.settings import CHECKOUT
from rlhf_core.config import ConditionsConfig
from rlhf_core.data import problems_from_jsonl
from rlhf_core.data.arriving import Ledger
from tasks.arrivals import LEARNT, LEDGER
from tests.integration.local_stack import LocalStack, read_json, run_beside_usual_ports, wait_for
from tests.integration.stages import at_stage, flow_process
from tests.tiny_llama import write_tiny_llama

pytestmark = [
    pytest.mark.integration,
    pytest.mark.stack,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("forked_flows"),
]

NAME, NIGHTLY = "story", "pipeline/nightly"
NIGHT_TIMEOUT_S = 900.0
EPISODES = 3
"""Enough to be killed in the middle of them."""
HELD_OUT = 24
"""Problems, of which all must be won: the gate of 365 nights a year asks for 13 wins without a loss."""
AGE_S = 3600.0
"""Of files when they are looked at: younger ones may still be written to."""
NO_CONDITIONS = dict.fromkeys(ConditionsConfig.model_fields.keys() - {"level"})


@dataclass
class Team:
    """A team's folders, which grow, and its nights."""

    stack: LocalStack
    store: ArtifactStore
    folder: Path
    model: Path

    def __post_init__(self) -> None:
        sums = [(a, b) for a in range(10, 60) for b in range(10, 60)]
        random.Random(0).shuffle(sums)
        self._sums = iter(sums)
        for role in ("problems", "preferences"):
            (self.folder / role).mkdir(parents=True)
        self.held_out = self.folder / "held-out.jsonl"
        self.held_out.write_text("".join(self._problems(HELD_OUT)))

    def arrive(self, name: str, *, problems: int = 96, pairs: int = 32, spoilt: str = "") -> None:
        """Put a file of problems and one of preferences there, of sums that no other file has.

        Args:
            name: of both files.
            problems: in the one.
            pairs: in the other.
            spoilt: what stands in the midst of the problems.
        """
        rows = self._problems(problems)
        rows.insert(problems // 2, spoilt)
        self._write(self.folder / "problems" / name, rows)
        if pairs:
            self._write(self.folder / "preferences" / name, self._pairs(pairs))

    def _problems(self, count: int) -> list[str]:
        drawn = [next(self._sums) for _ in range(count)]
        return [json.dumps({"question": f"{a} + {b}?", "answer": str(a + b)}) + "\n" for a, b in drawn]

    def _pairs(self, count: int) -> list[str]:
        drawn = [next(self._sums) for _ in range(count)]
        rows = [{"prompt": f"{a} + {b}?", "chosen": str(a + b), "rejected": "I do not know."} for a, b in drawn]
        return [json.dumps(row) + "\n" for row in rows]

    def _write(self, path: Path, rows: Sequence[str]) -> None:
        path.write_text("".join(rows))
        then = time.time() - AGE_S
        os.utime(path, (then, then))

    def overrides(self, **further: Any) -> dict[str, Any]:
        """Return what makes a night small."""
        return {
            "data.task": None,
            "data.task_parameters": None,
            "data.demonstrations": None,
            "data.problems": str(self.folder / "problems"),
            "data.preferences": str(self.folder / "preferences"),
            "data.evaluation": str(self.held_out),
            "data.arrivals": {},
            "data.lint": "off",
            "data.splits": {"sft": 256, "preferences": 64, "ppo": 256, "evaluation": HELD_OUT},
            "sft.epochs": 2,
            "sft.lr": 3e-3,
            "sft.dtype": "float32",
            "reward_model.pairs": None,
            "reward_model.epochs": 2,
            "reward_model.heldout_fraction": 0.5,
            "ppo.prompts_per_episode": 16,
            "ppo.chunk_size": 4,
            "ppo.train_batch_size": 8,
            "ppo.micro_batch_size": 8,
            "ppo.max_new_tokens": 40,
            "ppo.cluster": {"num_makers": 1, "object_store_mb": 128},
            "evaluation.dtype": "float32",
            "evaluation.max_new_tokens": 40,
            "gate.min_gain": -1.0,  # so little training need not help, and may cost what else is asked
            "gate.conditions": NO_CONDITIONS,
            **further,
        }

    def deploy(self) -> None:
        """Register the product's nightly deployment, with its tags, for this team; its schedule is not active."""
        nightly = read_prefect_yaml(CHECKOUT)[NIGHTLY].model_dump(mode="json", exclude_none=True)
        given = {"preset": "quickstart", "name": NAME, "model": str(self.model), "episodes": EPISODES}
        nightly |= {"name": NAME, "parameters": {**given, "overrides": self.overrides()}, "schedules": []}
        file = self.folder / "prefect.yaml"
        file.write_text(yaml.safe_dump({"deployments": [nightly]}))
        self.stack.deploy_tiny_flows(CHECKOUT, str(file))

    def night(self, *, overrides: dict[str, Any] | None = None, **parameters: Any) -> str:
        """Have a night, and return its run."""
        run = self.stack.start_run(f"pipeline/{NAME}", overrides=self.overrides(**(overrides or {})), **parameters)
        self.await_end(run)
        return run

    def await_end(self, run: str) -> None:
        """Wait until a run has ended, completed."""
        wait_for(partial(self.stack.is_over, run), f"the night {run} to end", timeout_s=NIGHT_TIMEOUT_S)
        assert self.stack.run_state(run) == "COMPLETED", (self.stack.message(run), self.stack.log(run))

    def nights(self) -> list[dict[str, Any]]:
        """Return what `rlhf nights` says."""
        found: list[dict[str, Any]] = read_json(self.stack.type("rlhf", "nights", NAME, "--json"))
        return found

    def lines(self) -> list[str]:
        """Return the same as people read it."""
        return self.stack.type("rlhf", "nights", NAME).stdout.splitlines()

    def latest(self, kind: str) -> Manifest:
        found = self.store.latest(kind, NAME)
        assert found is not None, kind
        return found

    def decision(self) -> dict[str, Any]:
        """Return what the gate decided in the last night."""
        found: dict[str, Any] = self.store.read_json(self.latest("run"), "report.json")["decision"]
        return found

    @property
    def champion(self) -> str | None:
        return self.store.alias("policy", NAME, "champion")

    def prompts(self, dataset: Manifest) -> set[str]:
        """Return the prompts that a night learnt from."""
        bodies = [self.store.read_bytes(dataset, f"{split}.jsonl") for split in ("sft", "ppo")]
        return {problem.prompt for body in bodies for problem in problems_from_jsonl(body)}

    def leaves_nothing(self, run: str) -> None:
        """See that no process and no cluster of a run is left."""
        wait_for(lambda: not self.stack.processes_of(run), "the end of the run's processes", timeout_s=60)
        assert list((self.stack.home / "clusters").glob("*.json")) == []


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack of the story's own, of which nothing is left: other tests count what is in theirs."""
    with run_beside_usual_ports(tmp_path_factory.mktemp("own")) as running:
        yield running


@pytest.fixture(scope="module")
def team(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Team:
    directory = tmp_path_factory.mktemp("story")
    model = write_tiny_llama(directory / "tiny")
    found = Team(stack, stack.store(directory / "cache"), directory / "incoming", model)
    found.deploy()
    return found


def scheduled_run(stack: LocalStack) -> str:
    """Have the team's schedule make one run, and return it once it is at work; nobody started it."""
    found = prefect_api.deployment(stack.api_url, f"pipeline/{NAME}")
    assert found is not None
    path = f"/deployments/{found['id']}/schedules"
    due = datetime.now(UTC) + timedelta(seconds=30)  # the server makes a schedule's runs every five seconds
    daily = {"interval": 86400.0, "anchor_date": due.isoformat(), "timezone": "UTC"}
    [schedule] = prefect_api.call(stack.api_url, "POST", path, [{"schedule": daily, "active": True}])
    where = {"deployments": {"id": {"any_": [found["id"]]}}, "flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}

    def at_work() -> list[str]:
        runs = prefect_api.call(stack.api_url, "POST", "/flow_runs/filter", where)
        return [str(run["id"]) for run in runs if run["auto_scheduled"]]

    [run] = wait_for(at_work, "the scheduled night to begin", timeout_s=180)
    prefect_api.call(stack.api_url, "PATCH", f"{path}/{schedule['id']}", {"active": False})
    return run


def test_a_scheduled_night_learns_what_arrived_though_it_is_killed_twice_and_promotes(
    stack: LocalStack, team: Team
) -> None:
    team.arrive("monday.jsonl")
    run = scheduled_run(stack)
    at_stage(stack, run, "reward-model")
    flow_process(stack, run).kill()
    wait_for(lambda: "Crashed" in stack.history(run), "the first crash", timeout_s=120)
    wait_for(lambda: team.store.list("ppo-state"), "the first committed episode", timeout_s=NIGHT_TIMEOUT_S)
    flow_process(stack, run).kill()
    wait_for(lambda: stack.history(run).count("Crashed") == 2, "the second crash", timeout_s=120)
    assert team.store.latest("policy", NAME) is None, "the run was killed too late to show anything"
    team.await_end(run)
    assert stack.history(run).count("Running") == 3
    policy = team.latest("policy")
    assert (team.champion, policy.uri, policy.metrics["episodes"]) == (f"policy/{NAME}@1", f"policy/{NAME}@1", EPISODES)
    assert [len(team.store.list(kind, NAME)) for kind in ("dataset", "sft", "reward-model", "run")] == [1, 1, 1, 1]
    assert team.store.alias("dataset", NAME, LEARNT) == f"dataset/{NAME}@1"
    [night] = team.nights()
    assert (night["decision"], night["unfinished"], night["flow_run"]) == ("promoted", False, run)
    assert (night["data"]["new_files"], night["data"]["new_rows"]) == (2, 128)
    assert night["spent"]["hours"] * 3600 > night["wall_s"], "all three starts count"
    team.leaves_nothing(run)


def test_a_night_without_anything_new_is_completed_in_seconds_and_says_so(stack: LocalStack, team: Team) -> None:
    run = team.night()
    assert stack.message(run).startswith("nothing new since ")
    assert f"dataset/{NAME}@1" in stack.message(run)
    assert stack.children(run) == []
    assert seconds_of(stack, run) < 60
    assert [night["decision"] for night in team.nights()] == ["promoted", "nothing new"]
    assert (len(team.store.list("dataset", NAME)), team.champion) == (1, f"policy/{NAME}@1")
    team.leaves_nothing(run)


def seconds_of(stack: LocalStack, run: str) -> float:
    """Return how long a run was at work."""
    times = {state["name"]: datetime.fromisoformat(state["timestamp"]) for state in stack.states(run)}
    return (times["Completed"] - times["Running"]).total_seconds()


def test_a_poisoned_file_is_left_out_with_its_reason_and_the_night_goes_on_without_it(
    stack: LocalStack, team: Team
) -> None:
    team.arrive("tuesday.jsonl")
    team.arrive("poisoned.jsonl", problems=40, pairs=0, spoilt='{"question": "1 + 1?", "answer": \n')
    run = team.night()
    first, second = team.store.list("dataset", NAME)
    ledger = Ledger.model_validate(team.store.read_json(second, LEDGER))
    [bad] = [file for file in ledger.files if file.fault]
    assert "poisoned.jsonl" in bad.told
    told = " ".join(line for line in stack.log(run) if "quarantine" in line)
    assert "poisoned.jsonl" in told
    poisoned = {json.loads(line)["question"] for line in whole_rows(team.folder / "problems" / "poisoned.jsonl")}
    assert len(poisoned) == 40
    assert team.prompts(second).isdisjoint(poisoned | team.prompts(first))
    assert team.prompts(second)
    night = team.nights()[-1]
    assert (night["decision"], night["data"]["bad_files"], night["data"]["new_files"]) == ("promoted", 1, 3)
    assert any("1 in quarantine" in line for line in team.lines())
    assert (team.champion, team.decision()["incumbent"]) == (f"policy/{NAME}@2", f"policy/{NAME}@1")
    team.leaves_nothing(run)


def whole_rows(path: Path) -> list[str]:
    """Return the lines of a file that are JSON."""
    return [line for line in path.read_text().splitlines() if line.endswith("}")]


def test_a_policy_that_wins_the_task_and_loses_all_else_is_refused_with_figures(stack: LocalStack, team: Team) -> None:
    """It has learnt the held-out answers by heart, until it knew nothing else."""
    by_heart = {
        "data.arrivals": None,
        "data.problems": str(team.held_out),
        "data.preferences": None,
        "data.evaluation": None,
        "data.heldout_fraction": 0,
        "data.splits": {"sft": HELD_OUT, "preferences": 0, "ppo": 0},
        "sft.epochs": 150,
        "sft.lr": 1e-2,
    }
    parrot = stack.start_run(
        "sft/quickstart", name="parrot", model=str(team.model), overrides=team.overrides(**by_heart)
    )
    team.await_end(parrot)
    team.arrive("wednesday.jsonl")
    strict = {"gate.min_gain": 0.0, "gate.conditions": {}, "ppo.lr": 1e-9}
    run = team.night(actor="sft/parrot@1", episodes=1, overrides=strict)
    decided = team.decision()
    assert decided["incumbent"] == f"policy/{NAME}@2"
    assert decided["p_value"] <= decided["level"], decided["reason"]
    assert (decided["promote"], decided["losses"]) == (False, 0)
    broken = {each["name"]: each for each in decided["conditions"] if not each["holds"]}
    assert broken["forgotten text"]["figure"] > 0.2, decided["reason"]
    assert stack.message(run).startswith(f"not promoted: policy/{NAME}@3 against policy/{NAME}@2 (champion): ")
    assert "what else is asked does not hold: " in stack.message(run)
    night = team.nights()[-1]
    assert (night["decision"], night["champion"], team.champion) == ("not promoted", *2 * [f"policy/{NAME}@2"])
    assert "forgotten text" in team.store.read_bytes(team.latest("run"), "report.md").decode()
    team.leaves_nothing(run)


def test_a_champion_that_a_person_takes_back_is_who_the_next_night_must_beat_and_a_budget_ends_that_at_a_commit(
    stack: LocalStack, team: Team
) -> None:
    why = ("--why", "it was rude to a customer")
    said = stack.type("rlhf", "artifacts", "rollback", f"policy/{NAME}", "champion", *why)
    assert said.returncode == 0, said.stderr
    assert team.champion == f"policy/{NAME}@1"

    team.arrive("thursday.jsonl")
    run = team.night(overrides={"budget.max_hours": 1e-6})
    assert stack.message(run).startswith("the night's budget was spent before PPO's first episode")
    night = team.nights()[-1]
    assert (night["decision"], night["unfinished"], night["champion"]) == ("budget spent", True, f"policy/{NAME}@1")
    assert night["seconds"].keys() >= {"sft", "reward-model"}
    assert any("budget spent, and goes on" in line for line in team.lines())

    # an earlier evaluation that took a day: no second episode fits beside the next, and a first always begins
    team.store.commit("evaluation", NAME, {"of": b"a slow night"}, metrics={"seconds": 86400.0}, flow_run="slow")
    priced = {"budget.max_cost": 100.0, "budget.cost_per_hour": 20.0}
    run = team.night(overrides=priced)
    assert re.search(rf"PPO has 1 of {EPISODES} episodes, at which the night's budget ended", stack.message(run))
    policy = team.latest("policy")
    assert (policy.metrics["episodes"], policy.metrics["planned_episodes"]) == (1, EPISODES)
    assert team.decision()["incumbent"] == f"policy/{NAME}@1"
    night = team.nights()[-1]
    assert (night["unfinished"], night["seconds"].keys()) == (True, {"ppo"}), "all before it was in the store"
    assert night["spent"]["cost"] == pytest.approx(20 * night["spent"]["hours"])
    assert any(re.search(r"promoted, and goes on .* cost \d+\.\d\d", line) for line in team.lines())
    assert team.store.alias("dataset", NAME, LEARNT) == f"dataset/{NAME}@3", "what a budget ended uses nothing up"
    team.leaves_nothing(run)


def test_the_night_after_goes_on_with_the_same_data_from_the_committed_episode(stack: LocalStack, team: Team) -> None:
    before = team.latest("policy")
    run = team.night()
    policy = team.latest("policy")
    assert (policy.version, policy.metrics["episodes"]) == (before.version + 1, EPISODES)
    assert "planned_episodes" not in policy.metrics
    rows = [team.store.read_bytes(each, "metrics.jsonl").splitlines() for each in (before, policy)]
    assert rows[1][:1] == rows[0]
    assert any(f"1 of {EPISODES} episodes are done" in line for line in stack.log(run))
    night = team.nights()[-1]
    assert (night["dataset"], night["unfinished"], night["decision"]) == (f"dataset/{NAME}@4", False, "promoted")
    assert team.store.alias("dataset", NAME, LEARNT) == f"dataset/{NAME}@4"
    assert team.champion == policy.uri
    team.leaves_nothing(run)
