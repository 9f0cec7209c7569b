"""Which policy a stage starts from."""

from __future__ import annotations

from rlhf_core.config import PipelineConfig
from tasks.context import open_context, resolve_policy
from tasks.results import Parent
from tasks.sentences import stage_task


@stage_task(name="find-policy")
def find_policy(config: PipelineConfig, reference: str | None) -> Parent:
    """Return the policy that a reference names, or the preset's latest SFT model, or its base model."""
    return resolve_policy(open_context(), config, reference)
