from __future__ import annotations

import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import presets
from flows.presets import draft_of, preset_names, preset_values, resolve
from flows.presets.keys import DIFFERENT, ELSEWHERE, keys, meant
from infra.services.prefect_yaml import read_prefect_yaml
from infra.settings import CHECKOUT
from rlhf_core.config import GateConfig, PipelineConfig, SplitsConfig
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


CLEARED: dict[str, Any] = {
    "data.demonstrations": (),
    "data.task_parameters": {},
    "data.splits": SplitsConfig(),
    "ppo.lora": None,
    "ppo.reward.functions": {},
    "template.stop": (),
    "template.prompt": None,
    "template.tags": None,
    "reward_model.pairs": None,
}
FULL = """\
name: full
template: {prompt: "Q: {prompt}", stop: [x], tags: {answer_start: {text: a}, answer_end: {text: b}}}
data: {task: gcd, task_parameters: {min_value: 2}, demonstrations: [d.jsonl, {path: e.jsonl}], splits: {sft: 20}}
reward_model: {pairs: 30}
ppo: {lora: {r: 4}, reward: {functions: {gsm8k_reward_fn: 0.5}}}
"""


def value_of(config: PipelineConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


@pytest.mark.parametrize("key", CLEARED)
def test_null_clears_a_list_a_mapping_and_an_option(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a parameter says so, a preset that extends another, or one that stands alone."""
    monkeypatch.setattr(presets, "DIRECTORY", tmp_path)
    (tmp_path / "full.yaml").write_text(FULL)
    nested: Any = None
    for part in reversed(key.split(".")):
        nested = {part: nested}
    (tmp_path / "less.yaml").write_text(yaml.safe_dump({"extends": "full", "name": "less", **nested}))
    (tmp_path / "alone.yaml").write_text(yaml.safe_dump({"name": "alone"} | {"data": {"task": "gcd"}} | nested))
    if key.startswith("data."):
        (tmp_path / "alone.yaml").write_text(
            yaml.safe_dump({"name": "alone", "data": {"task": "gcd"} | nested["data"]})
        )
    assert value_of(resolve("full"), key) != CLEARED[key]
    assert value_of(resolve("full", overrides={key: None}), key) == CLEARED[key]
    assert value_of(resolve("less"), key) == value_of(resolve("alone"), key) == CLEARED[key]
    assert not resolve("full", overrides={"data.splits": None}).data.splits.model_fields_set


def test_a_key_that_stands_twice_in_a_preset_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "DIRECTORY", tmp_path)
    (tmp_path / "twice.yaml").write_text("name: twice\ndata: {task: gcd}\nppo:\n  lr: 1.0e-5\n  lr: 1.0e-4\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml, line 5: the key 'lr' stands here and in line 4; keep one"):
        resolve("twice")


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
        ({"ppo.prompts_per_episode": 48}, (48, 24, 24, 12)),
        ({"ppo": {"prompts_per_episode": 48}}, (48, 24, 24, 12)),  # what a section does not name stays
        ({"ppo.prompts_per_episode": "48"}, (48, 24, 24, 12)),  # a text that the configuration takes as a number
        ({"ppo.chunk_size": 7}, (56, 7, 28, 14)),
        ({"ppo.num_trainers": 3}, (60, 30, 20, 10)),
        ({"ppo.num_trainers": 6, "ppo.strategy": "3d", "ppo.tp": 2}, (60, 30, 20, 10)),
        ({"ppo.num_trainers": 12, "ppo.strategy": "3d", "ppo.pp": 2, "ppo.sp": 2}, (60, 30, 20, 10)),
        ({"data.splits.ppo": 20}, (20, 20, 20, 10)),
        ({"data.splits": {}}, (64, 32, 32, 16)),
    ],
)
def test_batches_that_nobody_set_follow_those_that_are(overrides: dict[str, Any], sizes: tuple[int, ...]) -> None:
    ppo = resolve("quickstart", overrides=overrides).ppo
    assert (ppo.prompts_per_episode, ppo.chunk_size, ppo.train_batch_size, ppo.micro_batch_size) == sizes


@pytest.mark.parametrize("key", ["data.too_long", "data.bad_rows"])
def test_a_preset_on_its_own_data_keeps_its_sizes(key: str) -> None:
    [fixed] = draft_of("quickstart", overrides={key: "drop"}).sizes.fixed
    assert "data.splits.sft" in fixed
    for other in (
        {"data.problems": "x.jsonl", "data.task": None, "data.task_parameters": None},
        {"data": {"task": "gcd"}},
    ):
        most, least = draft_of("quickstart", overrides=other).sizes.fixed
        assert not [name for name in most | least if name.startswith("data.splits")]


def test_a_section_changes_what_it_names_and_leaves_the_rest_to_the_preset() -> None:
    preset = resolve("qwen-gsm8k")
    assert resolve("qwen-gsm8k", overrides={"ppo": {}, "template": {}, "gate": {"conditions": {}}}) == preset
    changed = resolve("qwen-gsm8k", overrides={"ppo": {"lora": {"r": 8}, "reward": {}}, "data": {"arrivals": None}})
    assert changed.ppo.lora is not None
    assert (changed.ppo.lora.r, changed.ppo.lora.alpha, changed.ppo.lr) == (8, 32, preset.ppo.lr)
    assert resolve("qwen-gsm8k", overrides={"ppo": {"lora": {}}}) == preset
    assert resolve("quickstart", overrides={"data.lint": "drop", "data.lint.echo": "off"}).data.lint.default == "drop"
    assert resolve("gsm8k", overrides={"data": {"arrivals": {}}}).data.arrivals is not None
    assert resolve("gsm8k", overrides={"data": {"evaluation": {"path": "x"}}}).data.evaluation[0].subset is None


def test_a_slip_of_some_zeros_is_told_soon() -> None:
    asked = {"ppo.prompts_per_episode": 10**9, "ppo.train_batch_size": 48, "data.splits.ppo": 10**10}
    with pytest.raises(ConfigError, match="choose a divisor of 1000000000"):
        resolve("quickstart", overrides=asked)


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
        ("quickstart", {"ppo.lrr": 1}, r"no configuration key 'ppo.lrr'; did you mean ppo\.lr\?$"),
        (
            "quickstart",
            {"ppo": {"learning_rate": 1}},
            r"no configuration key 'ppo\.learning_rate'; did you mean ppo\.lr",
        ),
        (
            "quickstart",
            {"data.demonstrations": [{"pth": "x"}]},
            r"for 2 reasons: .*mean data\.demonstrations\.path\?; \(2\) data\.demonstrations\.0\.path is missing",
        ),
        ("quickstart", {"data.demonstrations": {"subset": "x"}}, r": data\.demonstrations\.0\.path is missing$"),
        ("quickstart", {1: 2}, "a key of overrides must be text such as 'ppo.lr', but it is 1"),
        ("quickstart", {"data": None}, "data must be a mapping of its keys, such as data.task, .*, but it is null"),
        ("quickstart", {"data": "x.jsonl"}, "data must be a mapping of its keys, .*, but it is 'x.jsonl'"),
        ("quickstart", {"ppo.lr": None}, r"ppo\.lr: .*valid number, but it is null; null clears only a list, a free"),
        ("quickstart", {"ppo.lora.target_modules": None}, r": ppo\.lora\.target_modules: input .*, but it is null"),
        ("quickstart", {"ppo.lr": -1}, r"ppo\.lr: input should be greater than 0, but it is -1"),
        ("quickstart", {"ppo.lr": "fast"}, r"ppo\.lr: .*valid number.*'fast'"),
        ("quickstart", {"ppo.chunk_size": 7, "ppo.prompts_per_episode": 64}, "choose a divisor of 64"),
        ("quickstart", {"ppo.prompts_per_episode": 4096, "data.splits": {"ppo": 640}}, r"raise the second"),
        ("quickstart", {"data.problems": "x.jsonl"}, "data.task and data.problems or data.prompts exclude each other"),
        ("quickstart", {"ppo.cluster.num_makers": 0}, r"ppo\.cluster\.num_makers"),
        ("quickstart", {"ppo": 3}, r"ppo must be a mapping of its keys, such as ppo\..*, but it is 3"),
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
        ("quickstart", {"ppo": "abc", "data.splits.ppo": 10}, r"ppo must be a mapping .*'abc'"),
        ("quickstart", {"ppo": 64}, r"ppo must be a mapping .* but it is 64"),
        ("quickstart", {"ppo": None, "data.splits.ppo": 10}, r"ppo must be a mapping .*null"),
        (
            "quickstart",
            {"data.splits": "abc", "ppo.prompts_per_episode": 700},
            r"data\.splits must be a mapping .*'abc'",
        ),
        (
            "quickstart",
            {"ppo.chunk_size": 48, "ppo.prompts_per_episode": 64, "ppo.lr": -1, "foo.bar": 1},
            r"for 3 reasons: .*'foo\.bar'.*ppo\.lr: .*ppo\.chunk_size is 48.*works .*: \{\"ppo\.",
        ),
        (
            "quickstart",
            {"ppo.train_batch_size": 4, "ppo.samples_per_prompt": 8, "ppo.buffer_limit": 1},
            r"train_batch_size 4 and ppo\.samples_per_prompt 8, .* exclude each other.*\{\"ppo\.train_batch_size\": 8",
        ),
        ("quickstart", {"ppo.update_lora_weights": True, "ppo.lora": None}, r"it needs ppo\.lora"),
        ("quickstart", {"ppo.update_lora_weights": True, "ppo.lora.init": "pissa"}, r"and not ppo\.lora\.init pissa"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(preset: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(preset, overrides=overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("ppo.learning_rate", "ppo.lr"),  # HF Trainer, TRL
        ("learning_rate", "sft.lr reward_model.lr ppo.lr"),
        ("lr", "sft.lr reward_model.lr ppo.lr"),
        ("actor_learning_rate", "ppo.lr"),  # OpenRLHF
        ("actor_rollout_ref.actor.optim.lr", "ppo.lr"),  # verl
        ("critic.optim.lr", "ppo.critic_lr"),
        ("sft.per_device_train_batch_size", "sft.micro_batch_size"),
        ("ppo.train_micro_batch_size_per_gpu", "ppo.micro_batch_size"),
        ("ppo.cliprange", "ppo.eps_clip"),  # TRL
        ("clip_ratio", "ppo.eps_clip"),  # verl
        ("cliprange_value", "ppo.value_clip"),
        ("init_kl_coef", "ppo.kl_coef"),
        ("algorithm.kl_ctrl.kl_coef", "ppo.kl_coef"),
        ("gae_lambda", "ppo.lam"),
        ("gamma", "ppo.gamma"),
        ("sft.num_train_epochs", "sft.epochs"),
        ("ppo.num_ppo_epochs", "ppo.max_epochs"),
        ("rollout_batch_size", "ppo.prompts_per_episode"),
        ("experience_batch_size", "ppo.chunk_size"),  # coati
        ("num_generations", "ppo.samples_per_prompt"),
        ("actor_rollout_ref.rollout.n", "ppo.samples_per_prompt"),
        ("max_prompt_length", "ppo.max_prompt_tokens"),
        ("ppo.max_completion_length", "ppo.max_new_tokens"),
        ("top_p", "ppo.top_p"),
        ("ppo.warmup_ratio", "ppo.warmup_steps"),
        ("target_kl", "ppo.kl_target"),
        ("ppo.lora_rank", "ppo.lora.r"),
        ("lora_alpha", "sft.lora.alpha reward_model.lora.alpha ppo.lora.alpha"),
        ("ppo.bf16", "ppo.dtype"),
        ("world_size", "sft.num_trainers reward_model.num_trainers ppo.num_trainers"),
        ("tensor_parallel_size", "sft.tp reward_model.tp ppo.tp"),
        ("ppo.pp_size", "ppo.pp"),
        ("ppo.context_parallel_size", "ppo.sp"),
        ("model_name_or_path", "model.path"),
        ("eval-dataset", "data.evaluation"),
        ("PPO.LR", "ppo.lr"),
        ("ppo.learnig_rate", "ppo.lr"),  # misspelt, and by the name elsewhere
        ("ppo.num_makers", "ppo.cluster.num_makers"),
        ("data.split.sft", "data.splits.sft"),
        ("ppo.zzzz", ""),
    ],
)
def test_a_key_by_its_name_elsewhere_is_understood(written: str, ours: str) -> None:
    assert meant(written) == ours.split()


def test_every_key_that_is_called_otherwise_elsewhere_is_one_of_ours() -> None:
    known = {key.name for key in keys()}
    for key, names in ELSEWHERE.items():
        assert key in known or (key.startswith("*.") and any(name.endswith(key[1:]) for name in known)), key
        assert not any(name == key or name == key.removeprefix("*.") for name in names.split()), key
    assert set(DIFFERENT) <= {name for names in ELSEWHERE.values() for name in names.split()}


def test_what_elsewhere_counts_otherwise_is_said() -> None:
    with pytest.raises(ConfigError, match=r"did you mean ppo\.warmup_steps\? \(counted in optimizer steps\)"):
        resolve("quickstart", overrides={"ppo.warmup_ratio": 0.1})
    with pytest.raises(ConfigError, match=r"did you mean sft\.micro_batch_size\? \(batch_size / micro_batch_size, "):
        resolve("quickstart", overrides={"sft.gradient_accumulation_steps": 4})


SLOW = {"torch", "colossalai", "ray", "transformers", "datasets", "pyarrow", "reasoning_gym", "matplotlib", "numpy"}


@pytest.mark.integration
def test_flows_and_commands_import_without_what_is_slow() -> None:
    verbs = [f"flows.cli.{file.stem}" for file in (CHECKOUT / "flows" / "cli").glob("*.py") if file.stem != "__init__"]
    code = f"import sys, flows.pipeline, {', '.join(verbs)}; print(*sorted({SLOW} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == []


@pytest.mark.integration
def test_what_an_actor_builds_with_imports_no_orchestrator() -> None:
    code = "import sys, tasks.ppo_models, tasks.ppo_keeper; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


def test_a_gate_by_confidence_is_refused_with_what_replaces_it_and_read_where_it_was_stored() -> None:
    with pytest.raises(ConfigError, match=r"'gate.confidence' any longer; gate.year_error \(0.05\)"):
        resolve("quickstart", overrides={"gate.confidence": 0.99})
    values = preset_values("quickstart") | {"gate": {"confidence": 0.99, "min_gain": 0.1}}
    with pytest.raises(ConfigError, match=r"'gate.confidence' any longer"):
        draft_of("quickstart", values=values)
    # a run that an earlier release began
    goes_on = draft_of("quickstart", values=values, overrides={"gate.confidence": 0.9}, goes_on=True)
    assert goes_on.config.gate == GateConfig(min_gain=0.1)
    assert PipelineConfig.model_validate(goes_on.config.model_dump() | {"gate": values["gate"]}) == goes_on.config
