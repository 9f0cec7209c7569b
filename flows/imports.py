"""What the processes of flows import; those of this checkout's deployments are forked from one that has imported it."""

# ruff: noqa: F401 - imported for those that are forked

import fastapi.encoders
import prefect.deployments.steps
import prefect.engine
import prefect.flow_engine
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama

import flows.evaluate
import flows.pipeline
import flows.ppo
import flows.reward_model
import flows.sft
import infra.artifacts.s3
import rlhf_core.data.arriving
import rlhf_core.evaluation
import rlhf_core.ppo.learner
import rlhf_core.rollout.experience
import tasks.pictures.figures
import tasks.ppo_keeper
import tasks.ppo_models
