"""What processes that learn import, but for Prefect and Ray, which read their settings when they are imported."""

# ruff: noqa: F401 - imported for those that are forked

import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama

import infra.artifacts.s3
import rlhf_core.models.loading
import rlhf_core.models.lora
import rlhf_core.ppo.learner
import rlhf_core.rollout.experience
import tasks.ppo_models
from tests.warm import quicken

quicken()
