"""What learners publish, against the trainer's own merged weights: after many updates, in buckets of any size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rlhf_core.config import LoRAConfig
from rlhf_core.models.critic import Critic
from rlhf_core.models.lora import adapters_off, attach_lora, merged_parameters
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.ppo.published_weights import published_weights, trained_weights
from rlhf_core.weights import Publisher, Subscriber, WeightsError
from tests.tiny_llama import tiny_llama
from tests.unit.ppo.experience import tiny_experience
from tests.unit.ppo.test_learner import LORA, learner
from tests.unit.weights.published import WAIT_S

UPDATES = 24


@pytest.fixture(params=[1, 64 << 20])
def publisher(request: pytest.FixtureRequest) -> Iterator[Publisher]:
    """With one byte for a bucket every tensor has its own: both factors of an adapter never lie in one."""
    made = Publisher(transport="shared_memory", bucket_bytes=request.param, dtype=torch.float32)
    yield made
    made.close()


def maker_models(*, lora: LoRAConfig | None, seed: int) -> dict[str, nn.Module]:
    """Models of the trainer's form, but with other weights."""
    actor = tiny_llama(seed=seed, initializer_range=0.2)
    critic = Critic.from_causal_lm(tiny_llama(seed=seed + 1))
    if lora is not None:
        attach_lora(actor, lora, seed=seed)
        attach_lora(critic.trunk, lora, seed=seed + 1)
    return {"actor": actor.requires_grad_(False), "critic": critic.requires_grad_(False)}


def assert_same_policy(models: dict[str, nn.Module], ours: PPOLearner) -> None:
    for role in ("actor", "critic"):
        expected, found = ours.merged_weights(role), merged_parameters(models[role])
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), f"{role}.{name}"


def step(ours: PPOLearner, number: int) -> None:
    ours.training_step(ours.recompute(tiny_experience(seed=number)))


def test_adapters_replace_those_of_makers_update_after_update(publisher: Publisher) -> None:
    ours, models = learner(lora=LORA, lr=1e-2), maker_models(lora=LORA, seed=50)
    subscriber = Subscriber(lambda: models)
    full = publisher.publish(published_weights(ours, torch.float32, merged=False), version=0)
    subscriber.take(full, WAIT_S)
    assert_same_policy(models, ours)
    before = {name: tensor.clone() for name, tensor in ours.merged_weights("actor").items()}
    reference = tiny_llama(initializer_range=0.2)  # what the trainer began with
    ids = torch.arange(20).reshape(2, 10)
    for version in range(1, UPDATES + 1):
        step(ours, version)
        update = publisher.publish(trained_weights(ours), version=version, fully=False)
        subscriber.take(update, WAIT_S)
        subscriber.take(update, WAIT_S)  # twice is as good as once
        publisher.retire(in_use={version})
        assert_same_policy(models, ours)
    assert {slot.name.split(".")[-3] for slot in update.slots} == {"lora_A", "lora_B", "critic"}  # critic.head.weight
    assert any(not torch.equal(tensor, before[name]) for name, tensor in ours.merged_weights("actor").items())
    with torch.no_grad():
        torch.testing.assert_close(models["actor"](ids).logits, ours.actor(ids).logits, rtol=0, atol=0)
        with adapters_off(models["actor"]):
            torch.testing.assert_close(models["actor"](ids).logits, reference(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("init", ["kaiming_uniform", "pissa"])
def test_a_full_publication_sets_whatever_lies_below_the_adapters(init: str, publisher: Publisher) -> None:
    config = LORA.model_copy(update={"init": init, "bias": "all"})
    ours, models = learner(lora=config), maker_models(lora=config, seed=50)
    step(ours, 1)
    publication = publisher.publish(published_weights(ours, torch.float32, merged=False), version=1)
    Subscriber(lambda: models).take(publication, WAIT_S)
    assert_same_policy(models, ours)


@pytest.mark.parametrize("lora", [None, LORA])
def test_makers_without_adapters_get_the_sum_of_both_rounded_once(lora: LoRAConfig | None) -> None:
    ours = learner(lora=lora)
    step(ours, 1)
    with torch.no_grad():
        ours.critic.head.bias.fill_(10.03)  # 10.0 in bfloat16
    publisher = Publisher(transport="shared_memory", dtype=torch.bfloat16)
    publication = publisher.publish(published_weights(ours, torch.bfloat16), version=1)
    models = {role: model.to(torch.bfloat16) for role, model in maker_models(lora=None, seed=50).items()}
    models["critic"].head.float()
    Subscriber(lambda: models).take(publication, WAIT_S)
    publisher.close()
    for role in ("actor", "critic"):
        exact = ours.merged_weights(role)
        for name, parameter in models[role].named_parameters():
            expected = exact[name] if name.startswith("head.") else exact[name].to(torch.bfloat16)
            assert torch.equal(parameter, expected), f"{role}.{name}"
    assert models["critic"].head.bias.item() == pytest.approx(10.03)
    in_single = {slot.name for slot in publication.slots if slot.dtype != "bfloat16"}
    assert in_single == {"critic.head.weight", "critic.head.bias"}


def test_what_is_trained_without_adapters_is_every_weight(publisher: Publisher) -> None:
    ours, models = learner(lora=None), maker_models(lora=None, seed=50)
    step(ours, 1)
    update = publisher.publish(trained_weights(ours), version=1, fully=False)
    Subscriber(lambda: models).take(update, WAIT_S)
    assert_same_policy(models, ours)


@pytest.mark.parametrize(("theirs", "merged"), [(LORA, True), (None, False)])
def test_makers_of_the_other_kind_refuse_it(theirs: LoRAConfig | None, merged: bool, publisher: Publisher) -> None:
    ours, models = learner(lora=LORA), maker_models(lora=theirs, seed=50)
    publication = publisher.publish(published_weights(ours, torch.float32, merged=merged), version=1)
    with pytest.raises(WeightsError, match=r"unknown.*missing.*build trainer and makers from one configuration"):
        Subscriber(lambda: models).take(publication, WAIT_S)
    update = publisher.publish(trained_weights(ours), version=1, fully=False)
    if theirs is None:
        with pytest.raises(WeightsError, match="unknown"):
            Subscriber(lambda: models).take(update, WAIT_S)


def test_half_an_adapter_is_refused(publisher: Publisher) -> None:
    ours, models = learner(lora=LORA), maker_models(lora=LORA, seed=50)
    some = [(name, tensor) for name, tensor in trained_weights(ours) if "layers.1.mlp.up_proj.lora_B" not in name]
    with pytest.raises(WeightsError, match=r"missing.*actor\.model\.layers\.1\.mlp\.up_proj\.lora_B"):
        Subscriber(lambda: models).take(publisher.publish(some, version=1, fully=False), WAIT_S)
