from __future__ import annotations

import subprocess
import sys

import pytest

from flows.presets import preset_names, resolve
from rlhf_core.errors import ConfigError


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name: str) -> None:
    assert resolve(name).name == name


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


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("quikstart", {}, "there is no preset 'quikstart'; did you mean quickstart"),
        ("quickstart", {"ppo.lrr": 1}, r"no configuration key 'ppo.lrr'; did you mean ppo\.lr"),
        ("quickstart", {"ppo.lr": -1}, r"ppo\.lr: input should be greater than 0, but it is -1"),
        ("quickstart", {"ppo.lr": "fast"}, r"ppo\.lr: .*valid number.*'fast'"),
        ("quickstart", {"ppo.chunk_size": 7}, "choose a divisor of"),
        ("quickstart", {"ppo.prompts_per_episode": 4096, "ppo.chunk_size": 32}, r"raise the second"),
        ("quickstart", {"data.problems": "x.jsonl"}, "exactly one of data.task and data.problems"),
        ("quickstart", {"ppo.cluster.num_makers": 0}, r"ppo\.cluster\.num_makers"),
        ("quickstart", {"ppo": 3}, "ppo: "),
    ],
)
def test_a_mistake_is_told_in_one_sentence(preset: str, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(preset, overrides=overrides)
    assert "\n" not in str(caught.value)


def test_flows_import_without_torch_or_ray() -> None:
    code = "import flows.pipeline, sys; sys.exit(len({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
