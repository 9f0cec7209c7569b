"""coati's names in `train_prompts_on_ray`: they exist, load lazily, and take what coati's take."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

from rlhf_core.detached import train_prompts_on_ray as script

SIGNATURES = {
    "ExperienceCompositionRefs": (
        "sequences_attention_mask_action_mask_ref action_log_probs_ref base_action_log_probs_ref value_ref r_ref"
    ),
    "ExperienceMaker": "kl_coef",
    "DistributedTorchRayActor": "world_size rank local_rank master_addr master_port",
    "BasePPORole": "world_size rank local_rank master_addr master_port",
    "TrainablePPORole": "world_size rank local_rank master_addr master_port",
    "PPORayActorGroup": "num_nodes num_gpus_per_node ray_actor_type",
    "TrainableModelRayActorGroup": "num_nodes num_gpus_per_node ray_actor_type",
    "PPOActorRayActorGroup": "num_nodes num_gpus_per_node",
    "PPOCriticRayActorGroup": "num_nodes num_gpus_per_node",
    "PPOInitialRayActorGroup": "num_nodes num_gpus_per_node",
    "PPORewardRayActorGroup": "num_nodes num_gpus_per_node",
}
ACTORS = {
    "RayPPOActor": script.TrainablePPORole,
    "RayPPOCritic": script.TrainablePPORole,
    "RayPPORewardModel": script.BasePPORole,
    "RayPPOInitialModel": script.BasePPORole,
}
CALLS = {
    "PPORayActorGroup": ["async_init_model_from_pretrained"],
    "TrainableModelRayActorGroup": ["async_learn_on_experiences"],
    "PPOActorRayActorGroup": ["async_sample_prompts_and_make_sequence", "async_calculate_action_log_probs"],
    "PPOCriticRayActorGroup": ["async_calculate_value"],
    "PPOInitialRayActorGroup": ["async_calculate_base_action_log_probs"],
    "PPORewardRayActorGroup": ["async_calculate_r"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_constructors_take_what_coatis_take(name: str) -> None:
    parameters = inspect.signature(getattr(script, name)).parameters.values()
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[name].split()


@pytest.mark.parametrize("name", ACTORS)
def test_the_roles_are_actors_of_one_gpu_each(name: str) -> None:
    actor: Any = getattr(script, name)
    assert issubclass(actor.__ray_metadata__.modified_class, ACTORS[name])
    assert actor._default_options["num_gpus"] == 1


@pytest.mark.parametrize("name", CALLS)
def test_groups_have_calls_that_return_references(name: str) -> None:
    for method in CALLS[name]:
        assert callable(getattr(getattr(script, name), method))


def test_groups_inherit_as_coatis_do() -> None:
    assert issubclass(script.PPOActorRayActorGroup, script.TrainableModelRayActorGroup)
    assert issubclass(script.PPOCriticRayActorGroup, script.TrainableModelRayActorGroup)
    assert issubclass(script.PPOInitialRayActorGroup, script.PPORayActorGroup)
    assert not issubclass(script.PPORewardRayActorGroup, script.TrainableModelRayActorGroup)


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    assert set(SIGNATURES) | set(ACTORS) | {"main"} == set(script.__all__)
    assert list(inspect.signature(script.main).parameters) == ["args"]
    with pytest.raises(AttributeError, match="has no attribute 'RayPPO'"):
        _ = script.RayPPO  # type: ignore[attr-defined]


def test_help_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from rlhf_core.detached.train_prompts_on_ray import build_parser; build_parser().format_help(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
