"""Choices of PPO that exclude each other are told before anything is fetched or started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_core.config import DataConfig, EvaluationConfig, PipelineConfig, PPOConfig
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.generation import vllm_engine
from rlhf_core.models import loading
from tasks import preflight
from tasks.context import Context
from tasks.parents import wants_reward_model
from tasks.preflight import check_judges, check_ppo, check_trainers, check_verifier, settle_arithmetic


def preset(**changes: object) -> PipelineConfig:
    return PipelineConfig(name="test", data=DataConfig(task="gcd"), ppo=PPOConfig(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"critic_init": "reward_model", "advantage_estimator": "rloo", "samples_per_prompt": 2}, "rloo has no critic"),
        ({"critic_init": "reward_model", "legacy": True}, "legacy judges by rules of its own"),
    ],
)
def test_choices_that_exclude_each_other_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_ppo(preset(**changes))


def test_choices_that_go_together_pass() -> None:
    check_ppo(preset())
    check_ppo(preset(critic_init="reward_model"))


def test_a_critic_that_starts_as_the_reward_model_needs_one_even_where_it_does_not_score() -> None:
    assert not wants_reward_model(preset())
    assert wants_reward_model(preset(critic_init="reward_model"))
    assert wants_reward_model(preset(reward={"reward_model": 0.5}))


def of_data(judge: str = "verifier", verifier_weight: float = 0.0, **data: str) -> PipelineConfig:
    return PipelineConfig(
        name="test",
        data=DataConfig.model_validate(data),
        ppo=PPOConfig.model_validate({"reward": {"verifier": verifier_weight, "reward_model": 1.0}}),
        evaluation=EvaluationConfig.model_validate({"judge": judge}),
    )


@pytest.mark.parametrize("given", ["prompts", "preferences", "demonstrations"])
def test_no_verifier_is_asked_about_prompts_without_answers(given: str) -> None:
    with pytest.raises(ConfigError, match=f"ppo.reward.verifier is 1, but the prompts of data.{given} have no answers"):
        check_judges(of_data("reward_model", 1.0, **{given: "x.jsonl"}), trains="ppo")
    for trains in ("ppo", None):
        with pytest.raises(ConfigError, match=r"evaluation.judge is verifier, .*set evaluation.judge to reward_model"):
            check_judges(of_data(**{given: "x.jsonl"}), trains=trains)  # type: ignore[arg-type]
    check_judges(of_data("reward_model", **{given: "x.jsonl"}), trains="ppo")
    check_judges(of_data(**{given: "x.jsonl", "evaluation": "y.jsonl"}), trains="ppo")  # those may have answers
    check_judges(of_data("verifier", 1.0, **{given: "x.jsonl"}), trains="sft")


def test_problems_with_answers_pass() -> None:
    solved = {"demonstrations": "x.jsonl", "verifier": "gsm8k_reward_fn"}  # who names a verifier has answers in them
    for data in ({"task": "gcd"}, {"problems": "x.jsonl"}, solved):
        check_judges(of_data("verifier", 1.0, **data), trains="ppo")
    with pytest.raises(ConfigError, match=r"prompts of data.prompts have no answers"):
        check_judges(of_data("verifier", 1.0, **{**solved, "prompts": "y.jsonl"}), trains="ppo")


def test_a_reward_model_that_judges_answers_is_needed_even_where_it_does_not_score() -> None:
    config = preset()
    assert wants_reward_model(config.model_copy(update={"evaluation": EvaluationConfig(judge="reward_model")}))


@pytest.mark.parametrize(
    ("verifier", "sentence"),
    [
        ("exat", "data.verifier is 'exat'"),
        ("mine.rewards:right", "add mine.rewards to RLHF_REWARD_MODULES"),
        ("reasoning_gym:countdown", "records of task 'countdown', but data.task is 'gcd'"),
    ],
)
def test_a_verifier_that_leads_nowhere_is_refused(verifier: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_verifier(of_data(task="gcd", verifier=verifier), ())


@pytest.mark.parametrize("verifier", ["exact", "gsm8k_reward_fn", "reasoning_gym:gcd", "mine.rewards:right"])
def test_a_verifier_that_leads_somewhere_passes(verifier: str) -> None:
    check_verifier(of_data(task="gcd", verifier=verifier), ("mine",))


def of_trainers(stage: str, **settings: Any) -> PipelineConfig:
    values = {"name": "test", "data": {"task": "gcd"}, stage: settings}
    return PipelineConfig.model_validate(values)


@pytest.mark.parametrize(
    ("stage", "settings", "gpus", "sentence"),
    [
        ("sft", {"strategy": "gemini_auto"}, 0, r"sft.strategy cannot be had: .*there is no GPU; take gemini"),
        (
            "sft",
            {"strategy": "3d", "num_trainers": 2, "tp": 2},
            1,
            r"sft.strategy 3d needs a GPU for each of 2 trainers",
        ),
        ("ppo", {"strategy": "gemini_auto", "lora": None, "ptx_coef": 0.1}, 1, r"ppo.strategy .*does not accumulate"),
        ("ppo", {"strategy": "zero2", "num_trainers": 2}, 1, r"ppo.strategy zero2 needs a GPU for each of 2 trainers"),
        ("ppo", {"strategy": "gemini_auto", "lora": None, "cluster": {"trainer_gpus": 0}}, 8, "there is no GPU"),
        (
            "ppo",
            {"strategy": "ddp", "num_trainers": 2, "cluster": {"trainer_gpus": 0.5}},
            8,
            "several fit on one; raise",
        ),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_for_the_stage_that_trains(
    stage: str, settings: dict[str, Any], gpus: int, sentence: str
) -> None:
    config = of_trainers(stage, **settings)
    others = [name for name in ("sft", "reward_model", "ppo") if name != stage]
    check_trainers(config, others, gpus=gpus)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_trainers(config, [*others, stage], gpus=gpus)  # type: ignore[list-item]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strategy", ["plain", "ddp", "zero2", "zero2_cpu"])
@pytest.mark.parametrize("gpus", [0, 2])
def test_strategies_that_can_be_pass(strategy: str, gpus: int) -> None:
    for stage in ("sft", "reward_model", "ppo"):
        check_trainers(of_trainers(stage, strategy=strategy, num_trainers=2), [stage], gpus=gpus)  # type: ignore[list-item]


def arithmetic(config: PipelineConfig) -> list[str]:
    return [config.sft.dtype, config.reward_model.dtype, config.ppo.dtype, config.ppo.rollout_dtype]


@pytest.fixture
def slow_bfloat16(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have this processor be one without fast bfloat16, and return what is said to people."""
    said: list[str] = []
    monkeypatch.setattr(loading, "has_fast_bfloat16", lambda: False)
    monkeypatch.setattr(preflight, "say", lambda _, text: said.append(text))
    return said


def test_where_bfloat16_is_slow_a_run_computes_in_float32_and_says_so(
    context: Context, slow_bfloat16: list[str]
) -> None:
    assert arithmetic(settle_arithmetic(context, preset(), {"sft": 0, "ppo": 0})) == [
        "float32", "bfloat16", "float32", "float32",
    ]  # fmt: skip
    changed = "sft.dtype, ppo.dtype, ppo.rollout_dtype, evaluation.dtype"
    assert slow_bfloat16 == [f"this processor is faster with float32 than with bfloat16: float32 for {changed}"]


def test_arithmetic_that_somebody_set_is_kept_and_its_price_is_told(context: Context, slow_bfloat16: list[str]) -> None:
    asked = preset(dtype="float16", rollout_dtype="bfloat16")
    assert arithmetic(settle_arithmetic(context, asked, {"ppo": 0})) == ["bfloat16", "bfloat16", "float16", "bfloat16"]
    assert slow_bfloat16[-1] == (
        "this processor is faster with float32 than with bfloat16, which is set: ppo.rollout_dtype"
    )


def test_a_stage_with_gpus_stays_as_it_is_beside_one_without(context: Context, slow_bfloat16: list[str]) -> None:
    found = settle_arithmetic(context, preset(), {"sft": 0, "ppo": 1})
    assert arithmetic(found) == ["float32", "bfloat16", "bfloat16", "bfloat16"]
    assert slow_bfloat16 == [
        "this processor is faster with float32 than with bfloat16: float32 for sft.dtype, evaluation.dtype"
    ]
    answers = settle_arithmetic(context, preset(), {})
    assert arithmetic(answers) == ["bfloat16"] * 4
    assert answers.evaluation.dtype == "float32"
    assert settle_arithmetic(context, preset(), {"sft": 1}) == preset()


def test_processes_that_are_given_no_gpu_compute_on_processors(context: Context, slow_bfloat16: list[str]) -> None:
    found = settle_arithmetic(context, preset(cluster={"trainer_gpus": 0.0}), {"sft": 1, "ppo": 1})
    assert arithmetic(found) == ["bfloat16", "bfloat16", "float32", "bfloat16"]
    for cluster in ({"maker_gpus": 0.0}, {"trainer_gpus": 1.0}):  # the trainer has the only one
        found = settle_arithmetic(context, preset(cluster=cluster), {"ppo": 1})
        assert arithmetic(found) == ["bfloat16", "bfloat16", "bfloat16", "float32"]
    assert (
        slow_bfloat16[0]
        == "this processor is faster with float32 than with bfloat16: float32 for ppo.dtype, evaluation.dtype"
    )


@pytest.mark.usefixtures("slow_bfloat16")
@pytest.mark.parametrize(("own_gpus", "arithmetic_of_pairs"), [(0, "float32"), (1, "bfloat16")])
def test_pairs_for_the_reward_model_are_sampled_where_its_flow_is(
    context: Context, monkeypatch: pytest.MonkeyPatch, own_gpus: int, arithmetic_of_pairs: str
) -> None:
    monkeypatch.setattr(preflight, "available_gpus", lambda: own_gpus)
    found = settle_arithmetic(context, preset(), {"reward_model": 1})
    assert arithmetic(found) == ["bfloat16", "bfloat16", "bfloat16", arithmetic_of_pairs]
    assert arithmetic(settle_arithmetic(context, preset(), {"reward_model": 1, "ppo": 2})) == ["bfloat16"] * 4


@pytest.mark.usefixtures("slow_bfloat16")
def test_a_processor_that_has_it_stays_as_it_is(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "has_fast_bfloat16", lambda: True)
    assert settle_arithmetic(context, preset(), {"ppo": 0}) == preset()


@pytest.mark.parametrize(("narrow", "is_fast"), [(0.5, True), (1.2, True), (1.6, False)])
def test_a_processor_is_tried(monkeypatch: pytest.MonkeyPatch, narrow: float, is_fast: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    seconds = {torch.bfloat16: narrow, torch.float32: 1.0}
    monkeypatch.setattr(loading, "_seconds_of_a_product", lambda dtype: seconds[dtype])
    assert loading.has_fast_bfloat16.__wrapped__() == is_fast


def test_a_processor_that_has_no_instructions_for_it_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not loading.has_fast_bfloat16.__wrapped__()


def test_an_engine_that_is_not_installed_is_refused(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "open_context", lambda: context)
    monkeypatch.setattr(vllm_engine, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the package vllm, which is not installed; run `make vllm`"):
        preflight.preflight.fn(preset(engine="vllm"), trains="ppo", stages=["ppo"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"flash_attention": True}, "ppo.flash_attention needs a GPU, which is not here; set it to false"),
        (
            {"compile_layers": True},
            r"ppo.compile_layers: PyTorch cannot compile here \(.*no-such-compiler.*, or set it to false",
        ),
    ],
)
def test_passes_that_this_machine_cannot_have_are_refused_before_an_earlier_stage(
    context: Context, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], told: str
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(preflight, "open_context", lambda: context)
    no_compiler = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with no_compiler, pytest.raises(ModelError, match=told):
        preflight.preflight.fn(preset(**changes), trains="ppo", stages=["sft", "ppo"])
