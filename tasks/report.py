"""The run's report: stored as an artifact, shown on the run's page and in the terminal."""

from __future__ import annotations

import json
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from infra.artifacts import ArtifactRef
from rlhf_core.config import PipelineConfig
from tasks.context import Context, open_context, source_digest
from tasks.evaluate import OUTCOMES
from tasks.progress import duration
from tasks.results import SHOWN_CONFIDENCE, Decision, StageResult
from tasks.sentences import stage_task

REPORT, FACTS = "report.md", "report.json"
SHOWN_SAMPLES, SHOWN_LENGTH = 3, 120
PHASES = ("generate", "score", "learn", "synchronise", "commit")


@stage_task(name="show-episodes")
def show_episodes(policy: StageResult) -> None:
    """Put the episodes of a PPO run on its page, as a table."""
    rows = _episodes(open_context(), policy)
    create_table_artifact(
        key="ppo-episodes",
        table=[
            {**{name: _rounded(value) for name, value in row.items()}, "episode": row["episode"] + 1} for row in rows
        ],
        description=f"Episodes of {policy.uri}",
    )


@stage_task(name="report")
def write_report(
    config: PipelineConfig,
    stages: list[StageResult],
    evaluations: dict[str, StageResult],
    decision: Decision,
    champion: str | None,
    *,
    wall_s: float,
) -> str:
    """Store the run's report and put it on its page; return the reference of the `run` artifact.

    Args:
        config: the resolved preset.
        stages: in order; the last one is PPO.
        evaluations: by role.
        decision: the gate's.
        champion: after the decision.
        wall_s: seconds since the run began.
    """
    context = open_context()
    policy = stages[-1]
    episodes = _episodes(context, policy)
    facts = {
        "stages": [stage.model_dump() for stage in stages],
        "evaluations": {role: result.model_dump() for role, result in evaluations.items()},
        "decision": decision.model_dump(),
        "champion": champion,
        "wall_s": wall_s,
        "samples": _samples(context, evaluations),
        "episodes": episodes,
        "flow_run": context.flow_run,
        "page": _page(context),
    }
    text = _markdown(config, facts)
    reference = context.store.commit(
        "run",
        config.name,
        {
            REPORT: text.encode(),
            FACTS: json.dumps(facts, indent=1).encode(),
            "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in episodes).encode(),
            "config.json": config.model_dump_json(indent=1).encode(),
        },
        key=context.flow_run,
        parents=[ArtifactRef(each.uri, each.digest) for each in (*stages, *evaluations.values())],
        config=config.model_dump(mode="json"),
        metrics={"promoted": decision.promote, "difference": decision.difference},
        source_digest=source_digest("report"),
        flow_run=context.flow_run,
    )
    if context.flow_run is not None:
        create_markdown_artifact(key="report", markdown=text, description=f"Report of {reference.uri}")
    return reference.uri


def _markdown(config: PipelineConfig, facts: dict[str, Any]) -> str:
    parts = [f"# {config.name}: {_verdict(facts['decision'])}", "## Stages", _stage_table(facts["stages"])]
    parts += ["## Held-out problems, greedy answers", _evaluation_table(facts["evaluations"])]
    parts += ["## The gate", _gate_text(facts)]
    parts += ["## Three answers, before and after", _sample_list(facts["samples"])]
    parts += ["## PPO by episode", _episode_table(facts["episodes"])]
    parts += ["## Where the time went", _time_table(facts)]
    if facts["page"]:
        parts.append(f"The run in Prefect: {facts['page']}")
    return "\n\n".join(parts) + "\n"


def _verdict(decision: dict[str, Any]) -> str:
    return f"{decision['policy']} promoted" if decision["promote"] else f"{decision['policy']} not promoted"


def _stage_table(stages: list[dict[str, Any]]) -> str:
    rows = []
    for stage in stages:
        rows.append([stage["stage"], stage["uri"], _figures(stage), _origin(stage)])
    return _table(["stage", "artifact", "figures", ""], rows)


def _figures(stage: dict[str, Any]) -> str:
    metrics = stage["metrics"]
    if stage["stage"] == "sft":
        return f"loss {metrics['first_loss']:.3f} to {metrics['last_loss']:.3f} in {metrics['steps']} steps"
    if stage["stage"] == "reward-model":
        ends = f"[{metrics['low']:.3f}, {metrics['high']:.3f}]"
        return f"{metrics['accuracy']:.3f} {ends} right of {metrics['heldout_pairs']} held-out pairs"
    if stage["stage"] == "ppo":
        first, last = metrics["first_verifier"], metrics["last_verifier"]
        return f"verifier {first:.3f} to {last:.3f}, KL {metrics['last_kl']:.3f}, {metrics['episodes']} episodes"
    if stage["stage"] == "preferences" and "accuracy" in metrics:
        return f"{metrics['pairs']} pairs of {metrics['samples']} samples, {metrics['accuracy']:.2f} of them right"
    counts = {name.removeprefix("problems_"): value for name, value in metrics.items() if name != "seconds"}
    return ", ".join(f"{value} {name}" for name, value in counts.items())


def _evaluation_table(evaluations: dict[str, Any]) -> str:
    rows = [
        [
            role,
            each["metrics"]["policy"],
            f"{each['metrics']['accuracy']:.3f} [{each['metrics']['low']:.3f}, {each['metrics']['high']:.3f}]",
            f"{each['metrics']['well_formed']:.3f}",
            f"{each['metrics']['truncated']:.3f}",
            each["uri"],
        ]
        for role, each in evaluations.items()
    ]
    return _table(
        ["", "policy", f"right [{SHOWN_CONFIDENCE:.0%} interval]", "well formed", "cut off", "artifact"], rows
    )


def _gate_text(facts: dict[str, Any]) -> str:
    decision, champion = facts["decision"], facts["champion"]
    word = "**Promoted.**" if decision["promote"] else "**Not promoted.**"
    return f"{word} {decision['reason']}. Champion now: {champion or 'none'}."


def _sample_list(samples: list[dict[str, str]]) -> str:
    """Return one list a problem: a table would cut long answers off."""
    parts = []
    for sample in samples:
        roles = [name for name in sample if name not in ("prompt", "answer")]
        lines = [f"{_code(sample['prompt'])}, to be answered {_code(sample['answer'])}:", ""]
        lines += [f"* {role}: {_code(sample[role])}" for role in roles]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _episode_table(episodes: list[dict[str, Any]]) -> str:
    names = ("reward", "verifier", "well_formed", "kl", "length", "clip_fraction", "explained_variance")
    rows = [[str(row["episode"] + 1), *(f"{row[name]:.3f}" for name in names)] for row in episodes]
    header = [name.replace("_", " ").replace("kl", "KL, nats").replace("length", "tokens") for name in names]
    return _table(["episode", *header], rows)


def _time_table(facts: dict[str, Any]) -> str:
    rows = [[stage["stage"], duration(stage["seconds"]), _origin(stage)] for stage in facts["stages"]]
    rows += [
        [f"evaluate {role}", duration(each["seconds"]), _origin(each)] for role, each in facts["evaluations"].items()
    ]
    ppo = facts["stages"][-1]["metrics"]
    rows += [[f"of ppo: {phase}", duration(ppo[f"seconds_{phase}"]), ""] for phase in PHASES]
    worked = [each for each in (*facts["stages"], *facts["evaluations"].values()) if not each["reused"]]
    rest = max(0.0, facts["wall_s"] - sum(each["seconds"] for each in worked))
    rows += [["starting processes, storing, waiting", duration(rest), ""]]
    rows += [["**this run**", f"**{duration(facts['wall_s'])}**", ""]]
    return _table(["", "time", ""], rows)


def _origin(result: dict[str, Any]) -> str:
    return "from the store" if result["reused"] else "made now"


def _samples(context: Context, evaluations: dict[str, StageResult]) -> list[dict[str, str]]:
    """Return the first problems that two policies answer differently (then any), with everyone's answer."""
    from rlhf_core.evaluation import outcomes_from_jsonl

    answers = {
        role: outcomes_from_jsonl(context.store.read_bytes(context.store.resolve(result.uri), OUTCOMES))
        for role, result in evaluations.items()
        if role != "champion"
    }
    rows = [
        {
            "prompt": outcomes[0].prompt,
            "answer": outcomes[0].answer,
            **{role: outcome.response for role, outcome in zip(answers, outcomes, strict=True)},
        }
        for outcomes in zip(*answers.values(), strict=True)
    ]
    rows.sort(key=lambda row: row.get("sft") == row["ppo"])  # stable: those that changed come first
    return rows[:SHOWN_SAMPLES]


def _episodes(context: Context, policy: StageResult) -> list[dict[str, Any]]:
    body = context.store.read_bytes(context.store.resolve(policy.uri), "metrics.jsonl")
    return [json.loads(line) for line in body.decode().splitlines()]


def _page(context: Context) -> str | None:
    api = context.settings.prefect_api_url
    if context.flow_run is None or api is None:
        return None
    return f"{api.removesuffix('/').removesuffix('/api')}/runs/flow-run/{context.flow_run}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _code(text: str) -> str:
    """Return text as it is, on one line: tags are not taken for HTML."""
    flat = " ⏎ ".join(text.replace("`", "'").splitlines())
    return f"`{flat[:SHOWN_LENGTH]}{'…' if len(flat) > SHOWN_LENGTH else ''}`" if flat else "(empty)"


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
