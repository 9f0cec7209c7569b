"""coati's experience maker: one batch of padded prompts in, one experience out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_core.coati.generate_kwargs import generation_settings_from_kwargs, is_greedy
from rlhf_core.config import RewardConfig, RolloutConfig, TemplateConfig
from rlhf_core.counting import counted
from rlhf_core.data import PromptTemplate, problem_key
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.models.critic import Critic
from rlhf_core.rewards.scoring import build_scorer
from rlhf_core.rewards.sources import AnyRewardModel
from rlhf_core.rollout.advantages import WITH_CRITIC
from rlhf_core.rollout.experience import ExperienceMaker
from rlhf_core.types import Experience, Prompt, Sample

UNLIMITED = 1 << 30


class NaiveExperienceMaker(ExperienceMaker):
    """Makes experience from batches of token ids, as coati's class does.

    Differs from it: every call draws other noise (upstream seeded each with 41); the score is paid at the last token
    and not clipped; verifiable rewards count as shares of their maximum. `legacy=True` gives upstream's numbers.

    Args:
        actor: causal language model that samples.
        critic: predicts the return before each token; None with an estimator that needs none.
        reward_model: a `RewardModel`, an `RLVRRewardModel`, or whatever is called like the first.
        initial_model: the KL penalty is measured from it; None takes the actor with its adapters switched off.
        tokenizer: of the model.
        kl_coef: weight of the per-token KL penalty, per nat.
        gamma: discount per token.
        lam: bias against variance of the advantages.
        **options: `seed` (0), and fields of `RolloutConfig`; `rollout_dtype` is float32 here, which leaves the
            models' own arithmetic alone.
    """

    def __init__(
        self,
        actor: PreTrainedModel,
        critic: Critic | None,
        reward_model: AnyRewardModel,
        initial_model: PreTrainedModel | None,
        tokenizer: Any,
        kl_coef: float = 0.01,
        gamma: float = 1.0,
        lam: float = 0.95,
        **options: Any,
    ) -> None:
        seed = int(options.pop("seed", 0))
        defaults: dict[str, Any] = {
            "rollout_dtype": "float32",
            "max_prompt_tokens": UNLIMITED,
            "reward": RewardConfig(verifier=0.0, reward_model=1.0),
        }
        try:
            config = RolloutConfig(**{**defaults, **options, "kl_coef": kl_coef, "gamma": gamma, "lam": lam})
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the options together"
            raise ConfigError(f"NaiveExperienceMaker cannot take {place}: {first['msg']}") from None
        template = PromptTemplate(tokenizer, TemplateConfig())
        super().__init__(
            actor,
            critic if config.advantage_estimator == WITH_CRITIC else None,
            build_scorer(config.reward, reward_model, template=template, scaled=not config.legacy),
            initial_model,
            config=config,
            template=template,
            seed=seed,
        )
        self.samples: list[Sample] = []
        """Of the last call, for people."""
        self._calls = 0

    def make_experience(  # type: ignore[override]  # coati's parameters, not our base's
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        gt_answer: Sequence[str | None] | None = None,
        **generate_kwargs: Any,
    ) -> Experience:
        """Sample a response to each prompt (`samples_per_prompt` of them, in a row), and score it.

        Args:
            input_ids: [B P], prompts padded on the left.
            attention_mask: [B P], True on tokens.
            gt_answer: reference answers, for verifiable rewards.
            **generate_kwargs: as `generation_settings_from_kwargs` takes them.

        Raises:
            DataError: if there is no prompt, or one has no tokens.
            ConfigError: if generation takes no such argument.
        """
        self.generation = generation_settings_from_kwargs(generate_kwargs, self.template.tokenizer)
        self.greedy = is_greedy(generate_kwargs)
        answers = [None] * len(input_ids) if gt_answer is None else list(gt_answer)
        prompts = [
            prompt
            for prompt in prompts_from_batch(input_ids, attention_mask, answers, self.template.tokenizer)
            for _ in range(self.config.samples_per_prompt)
        ]
        seen: Counter[str] = Counter()
        numbers = []
        for prompt in prompts:
            numbers.append(seen[prompt.key])
            seen[prompt.key] += 1
        made = super().make_experience(prompts, numbers, episode=self._calls, policy_version=0)
        self._calls += 1
        self.samples = made.samples
        return made.experience


def prompts_from_batch(
    input_ids: Tensor, attention_mask: Tensor, answers: Sequence[str | None], tokenizer: Any
) -> list[Prompt]:
    """Return a padded batch's prompts without their padding.

    Args:
        input_ids: [B P].
        attention_mask: [B P], True on tokens.
        answers: one for each row.
        tokenizer: decodes prompts for people and for their keys.

    Raises:
        DataError: if there is no row, a row has no token, or the shapes disagree.
    """
    if input_ids.shape != attention_mask.shape or len(answers) != len(input_ids):
        raise DataError(
            f"expected input_ids and attention_mask of one shape [B P] and an answer for each row, got "
            f"{tuple(input_ids.shape)}, {tuple(attention_mask.shape)} and {counted(len(answers), 'answer')}"
        )
    prompts = []
    for row, (ids, mask, answer) in enumerate(zip(input_ids, attention_mask.bool(), answers, strict=True)):
        kept = ids[mask].tolist()
        if not kept:
            raise DataError(f"row {row} of the batch is all padding; leave it out of the batch")
        text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        prompts.append(Prompt(tuple(kept), text, answer, problem_key(text)))
    if not prompts:
        raise DataError("the batch of prompts is empty; the loader should yield at least one row")
    return prompts
