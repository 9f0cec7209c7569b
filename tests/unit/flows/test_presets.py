from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows import presets
from flows.presets import preset_names, resolve
from infra.services.prefect_yaml import read_prefect_yaml
from infra.settings import CHECKOUT
from rlhf_core.data.preparing import SOURCES
from rlhf_core.data.reading import Access, detect_role
from rlhf_core.errors import ConfigError, DataError


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str) -> None:
    assert resolve(name).name == name


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_says_in_its_head_who_ran_it(name: str) -> None:
    head, _keys = (presets.DIRECTORY / f"{name}.yaml").read_text().split("\nname: ", 1)
    assert "run by us" in head.lower()


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_deployment_of_the_whole_chain(name: str) -> None:
    assert read_prefect_yaml(CHECKOUT)[f"pipeline/{name}"].parameters["preset"] == name


def test_a_preset_may_hold_only_what_differs_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "DIRECTORY", tmp_path)
    (tmp_path / "short.yaml").write_text(
        "name: short\nseed: 3\ndata: {task: gcd, splits: {sft: 20, ppo: 80}}\nppo: {episodes: 2, lr: 1.0e-4}\n"
    )
    (tmp_path / "long.yaml").write_text("extends: short\nname: long\ndata: {splits: {ppo: 800}}\nppo: {episodes: 30}\n")
    (tmp_path / "longer.yaml").write_text("extends: long\nname: longer\n")
    (tmp_path / "lost.yaml").write_text("extends: shrt\nname: lost\n")
    config = resolve("long", overrides={"data.splits.sft": 21})
    assert (config.name, config.seed, config.data.task) == ("long", 3, "gcd")
    assert (config.data.splits.sft, config.data.splits.ppo) == (21, 800)
    assert (config.ppo.episodes, config.ppo.lr) == (30, 1e-4)
    assert resolve("short").data.splits.ppo == 80  # what extends it leaves it alone
    with pytest.raises(ConfigError, match="extends long, which extends short; a preset may extend one that stands"):
        resolve("longer")
    with pytest.raises(ConfigError, match="there is no preset 'shrt'; did you mean short"):
        resolve("lost")


def test_the_evidence_is_the_quickstart_with_more_of_it() -> None:
    quick, evidence = resolve("quickstart").model_dump(), resolve("evidence").model_dump()
    assert {key for key in quick if quick[key] != evidence[key]} == {"name", "data", "ppo"}
    assert {key for key in quick["ppo"] if quick["ppo"][key] != evidence["ppo"][key]} == {"episodes"}
    assert {key for key in quick["data"] if quick["data"][key] != evidence["data"][key]} == {"splits"}
    assert evidence["data"]["splits"]["evaluation"] >= 400


def test_hub_datasets_are_the_default_and_files_take_their_place() -> None:
    hub = resolve("gsm8k").data
    assert [(each[0].path, each[0].split) for each in (hub.demonstrations, hub.evaluation)] == [
        ("openai/gsm8k", "train"),
        ("openai/gsm8k", "test"),
    ]
    files = {"data.demonstrations": "train.jsonl", "data.evaluation": "test.jsonl"}
    data = resolve("gsm8k", overrides=files).data
    assert [each[0].path for each in (data.demonstrations, data.evaluation)] == list(files.values())
    assert data.demonstrations[0].subset is None  # the hub dataset's


def test_a_path_that_begins_with_a_dot_starts_at_the_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "DIRECTORY", tmp_path / "presets")
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "own.yaml").write_text(
        "name: own\ndata:\n  task: gcd\n  demonstrations: ./data/d.jsonl\n"
        "  preferences: [./p.jsonl, {path: ./q.jsonl}, r.jsonl, {path: s3://b/s.jsonl}]\n"
    )
    (tmp_path / "presets" / "more.yaml").write_text("extends: own\nname: more\n")

    def paths(role: str, **changes: Any) -> list[str]:
        data = resolve("more", overrides={f"data.{key}": value for key, value in changes.items()}).data
        return [source.path for source in getattr(data, role)]

    elsewhere = str(tmp_path / "presets")
    assert paths("demonstrations") == [f"{elsewhere}/data/d.jsonl"]
    monkeypatch.chdir(tmp_path)
    assert paths("demonstrations") == ["presets/data/d.jsonl"]  # no place of this machine in a run's record
    assert paths("preferences") == ["presets/p.jsonl", "presets/q.jsonl", "r.jsonl", "s3://b/s.jsonl"]
    assert paths("demonstrations", demonstrations="./mine.jsonl") == ["./mine.jsonl"]  # a parameter's is the user's
    with pytest.raises(DataError, match=r"data file presets/data/d\.jsonl does not exist, nor does its directory"):
        detect_role(resolve("own").data.demonstrations[0], Access(tmp_path))


def test_every_key_of_the_data_that_names_sets_may_begin_with_a_dot() -> None:
    assert set(presets.SOURCES) == set(SOURCES)


def test_flat_parameters_and_overrides_change_the_preset() -> None:
    config = resolve("quickstart", model="some/model", episodes=3, seed=7, overrides={"ppo.lr": 1e-6, "ppo.lora.r": 4})
    assert (config.model.path, config.ppo.episodes, config.seed) == ("some/model", 3, 7)
    assert (config.ppo.lr, config.ppo.lora.r if config.ppo.lora else None) == (1e-6, 4)


def test_a_model_given_by_hand_drops_the_presets_size() -> None:
    assert resolve("llama7b").model.num_parameters is not None
    assert resolve("llama7b", model="/some/llama").model.num_parameters is None


def test_overrides_win_over_flat_parameters() -> None:
    assert resolve("quickstart", episodes=3, overrides={"ppo.episodes": 5}).ppo.episodes == 5


def test_a_free_mapping_takes_keys_of_its_own() -> None:
    assert (
        resolve("quickstart", overrides={"data.task_parameters.max_value": 50}).data.task_parameters["max_value"] == 50
    )


@pytest.mark.parametrize("preset", presets.preset_names())
def test_a_preset_trains_with_one_plain_process_unless_told_otherwise(preset: str) -> None:
    config, told = resolve(preset), {"ppo.strategy": "zero2", "sft.strategy": "ddp", "sft.num_trainers": 2}
    assert {(each.strategy, each.num_trainers) for each in (config.sft, config.reward_model, config.ppo)} == {
        ("plain", 1)
    }
    other = resolve(preset, overrides=told)
    assert [other.ppo.strategy, other.sft.strategy, other.sft.num_trainers] == ["zero2", "ddp", 2]


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [
        ({"ppo.prompts_per_episode": 48}, (48, 24, 24, 24)),
        ({"ppo": {"prompts_per_episode": 48}}, (48, 24, 24, 24)),
        ({"ppo.prompts_per_episode": "48"}, (48, 24, 24, 24)),  # a text that the configuration takes as a number
        ({"ppo.chunk_size": 7}, (56, 7, 28, 28)),
        ({"ppo.num_trainers": 3}, (60, 30, 20, 20)),
        ({"data.splits.ppo": 20}, (20, 20, 20, 20)),
        ({"data.splits": {}}, (64, 32, 32, 32)),
    ],
)
def test_batches_that_nobody_set_follow_those_that_are(overrides: dict[str, Any], sizes: tuple[int, ...]) -> None:
    ppo = resolve("quickstart", overrides=overrides).ppo
    assert (ppo.prompts_per_episode, ppo.chunk_size, ppo.train_batch_size, ppo.micro_batch_size) == sizes


def test_a_presets_own_batches_give_way_to_what_is_set_alone() -> None:
    ppo = resolve("hh-rlhf", overrides={"ppo.train_batch_size": 12}).ppo  # of 32 prompts, chunks of 16
    assert ppo.train_batch_size == 12
    assert (ppo.prompts_per_episode % 12, ppo.prompts_per_episode % ppo.chunk_size, 12 % ppo.micro_batch_size) == (
        0,
    ) * 3
    whole = resolve("hh-rlhf", overrides={"seed": 3}).ppo
    assert (whole.prompts_per_episode, whole.chunk_size, whole.train_batch_size) == (32, 16, 16)


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("quikstart", {}, "there is no preset 'quikstart'; did you mean quickstart"),
        ("quickstart", {"ppo.lrr": 1}, r"no configuration key 'ppo.lrr'; did you mean ppo\.lr"),
        ("quickstart", {"ppo.lr": -1}, r"ppo\.lr: input should be greater than 0, but it is -1"),
        ("quickstart", {"ppo.lr": "fast"}, r"ppo\.lr: .*valid number.*'fast'"),
        ("quickstart", {"ppo.chunk_size": 7, "ppo.prompts_per_episode": 64}, "choose a divisor of 64"),
        ("quickstart", {"ppo.prompts_per_episode": 4096, "data.splits": {"ppo": 640}}, r"raise the second"),
        ("quickstart", {"data.problems": "x.jsonl"}, "data.task and data.problems or data.prompts exclude each other"),
        ("quickstart", {"ppo.cluster.num_makers": 0}, r"ppo\.cluster\.num_makers"),
        ("quickstart", {"ppo": 3}, "ppo: "),
        ("quickstart", {"ppo.strategy": "zero3"}, r"ppo\.strategy: input should be .*'zero2'.*but it is 'zero3'"),
        (
            "quickstart",
            {"ppo.num_trainers": 3, "ppo.prompts_per_episode": 64, "ppo.train_batch_size": 32},
            "which do not divide an episode's 64",
        ),
        ("quickstart", {"ppo.strategy": "gemini", "ppo.num_trainers": 2}, "trains no adapters; set ppo.lora to null"),
        ("quickstart", {"ppo.max_staleness": -1}, r"ppo\.max_staleness: input should be greater than or equal to 0"),
        ("quickstart", {"ppo.stale_samples": "drop", "ppo.max_staleness": 1}, r"set ppo\.buffer_limit to at least 1"),
        ("quickstart", {"ppo.stale_samples": "drop", "ppo.buffer_limit": 4}, r"and ppo\.max_staleness too"),
        (
            "quickstart",
            {"ppo.buffer_limit": 1, "ppo.train_batch_size": 4, "ppo.chunk_size": 32},
            "less than a chunk",
        ),
        ("quickstart", {"ppo.update_lora_weights": True, "ppo.lora": None}, r"it needs ppo\.lora"),
        ("quickstart", {"ppo.update_lora_weights": True, "ppo.lora.init": "pissa"}, r"and not ppo\.lora\.init pissa"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(preset: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(preset, overrides=overrides)
    assert "\n" not in str(caught.value)


SLOW = {"torch", "colossalai", "ray", "transformers", "datasets", "pyarrow", "reasoning_gym", "matplotlib", "numpy"}


def test_flows_and_commands_import_without_what_is_slow() -> None:
    verbs = [f"flows.cli.{file.stem}" for file in (CHECKOUT / "flows" / "cli").glob("*.py") if file.stem != "__init__"]
    code = f"import sys, flows.pipeline, {', '.join(verbs)}; print(*sorted({SLOW} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == []


def test_what_an_actor_builds_with_imports_no_orchestrator() -> None:
    code = "import sys, tasks.ppo_models, tasks.ppo_keeper; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
