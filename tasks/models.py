"""A stage's models: whole ones, or adapters over a base. Where their files are, and how they are loaded.

An artifact of adapters names its base in `base.json`, by reference and digest; it is a parent of it, too. Actors import
this: no Prefect.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.artifacts.manifest import BASE_FILE
from rlhf_core.errors import ModelError
from tasks.context import Context, materialise
from tasks.results import Parent

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import PreTrainedModel

    from infra.artifacts import ArtifactStore
    from infra.artifacts.manifest import Manifest
    from rlhf_core.config import RewardModelConfig, SFTConfig
    from rlhf_core.models.base import Base
    from rlhf_core.models.reward_model import RewardModel


class NotedBase(BaseModel):
    """What adapters are over, as it is noted beside them; what a later release adds is not read."""

    model_config = ConfigDict(frozen=True)

    uri: str
    digest: str
    hub: str | None = None
    """Of a model from the hub: its name and revision."""


def write_base(directory: Path, base: Parent) -> None:
    """Note beside adapters what they are over."""
    from rlhf_core.models.locating import name_on_hub

    note = NotedBase(uri=base.uri, digest=base.digest, hub=name_on_hub(Path(base.path)) if base.path else None)
    (directory / BASE_FILE).write_text(json.dumps(note.model_dump(exclude_none=True)))


def read_base(store: ArtifactStore, manifest: Manifest) -> NotedBase | None:
    """Return what a model's adapters are over; None if it is a whole model.

    Raises:
        ModelError: if the note cannot be read.
    """
    if not manifest.has_adapters:
        return None
    try:
        return NotedBase.model_validate_json(store.read_bytes(manifest, BASE_FILE))
    except ValidationError as error:
        raise ModelError(
            f"{BASE_FILE} of {manifest.uri} does not say what its adapters are over; it is damaged"
        ) from error


def opened_base(context: Context, base: Parent, arithmetic: str) -> Base:
    """Return a base, whose copy on this machine is made first if need be.

    Args:
        context: the open context.
        base: a whole model.
        arithmetic: in which it is computed: float32 or bfloat16.

    Raises:
        ModelError: if what lies at its path is not what was meant; or it cannot be read or copied.
    """
    import torch

    from rlhf_core.models.base import open_base
    from rlhf_core.models.loading import model_digest

    def check() -> None:  # an artifact is verified as it is fetched
        if (
            base.path
            and (there := model_digest(Path(base.path), models_dir=context.settings.models_dir)) != base.digest
        ):
            raise ModelError(
                f"on {platform.node()}, {base.path} holds another model than when this run was planned (digest "
                f"{there[:12]}, then {base.digest[:12]}); put back what was there, or start a new run, which takes it "
                "as it is now"
            )

    return open_base(
        materialise(context, base), base.digest, arithmetic=getattr(torch, arithmetic),
        models_dir=context.settings.models_dir, check=check,
    )  # fmt: skip


def load_frozen(
    context: Context, model: Parent, base: Base, arithmetic: str, *, device: torch.device
) -> PreTrainedModel:
    """Return a frozen policy over a mapped base; its own adapters are frozen, and others may be trained over them.

    Args:
        context: the open context.
        model: whole, or adapters.
        base: the copy of what `parents.base_of` returned.
        arithmetic: of its passes.
        device: of the model.
    """
    import torch

    from rlhf_core.models.adapters import load_adapters
    from rlhf_core.models.base import load_base
    from rlhf_core.models.lora import freeze_adapters

    loaded = load_base(base, arithmetic=getattr(torch, arithmetic), device=device)
    if model.digest != base.digest:
        load_adapters(loaded, materialise(context, model))
        freeze_adapters(loaded)
    return loaded


def load_policy(
    context: Context, model: Parent, base: Parent, arithmetic: str, *, shares_base: bool
) -> PreTrainedModel:
    """Return a policy that answers: a whole model in memory of its own, or adapters over a mapped base.

    Args:
        context: the open context.
        model: whole, or adapters.
        base: what `parents.base_of` returned.
        arithmetic: float32 or bfloat16.
        shares_base: map a whole model, too: adapters are over it, and it may fit but once.
    """
    from rlhf_core.models.loading import default_device, load_causal_lm

    if model.uri == base.uri and not shares_base:
        return load_causal_lm(materialise(context, model), arithmetic, device=default_device())
    return load_frozen(context, model, opened_base(context, base, arithmetic), arithmetic, device=default_device())


def load_to_train(
    context: Context, model: Parent, base: Parent, config: SFTConfig | RewardModelConfig
) -> PreTrainedModel:
    """Return what a stage trains: a model in memory of its own; or a frozen one over a mapped base, for adapters."""
    from rlhf_core.models.loading import default_device

    if not config.shares_base:
        return load_own(context, model, base, "float32")
    copy = opened_base(context, base, config.dtype)
    return load_frozen(context, model, copy, config.dtype, device=default_device())


def with_base(parents: Sequence[Parent], base: Parent) -> list[Parent]:
    """Return what an artifact came from, its base among it: the last, where it is not there anyway."""
    return [*parents, *([] if base.uri in {parent.uri for parent in parents} else [base])]


def load_own(context: Context, model: Parent, base: Parent, dtype: str) -> PreTrainedModel:
    """Return a model in memory of its own, all of whose weights may be trained; adapters merged, and rounded once."""
    import torch

    from rlhf_core.models.adapters import load_adapters
    from rlhf_core.models.loading import default_device, load_causal_lm
    from rlhf_core.models.lora import merge_adapters
    from rlhf_core.models.trunk import cast_weights

    if model.uri == base.uri:
        return load_causal_lm(materialise(context, model), dtype, device=default_device())
    loaded = load_causal_lm(materialise(context, base), "float32", device=default_device())
    load_adapters(loaded, materialise(context, model))
    merge_adapters(loaded)
    cast_weights(loaded, getattr(torch, dtype))
    return loaded


def load_reward_model(
    context: Context,
    model: Parent,
    base: Parent,
    arithmetic: str,
    *,
    copied_for: str | None = None,
    merged: bool = False,
) -> RewardModel:
    """Return a reward model: a whole one in memory of its own, or adapters and a head over a mapped base.

    Its own adapters can be trained, which a critic that starts from it does.

    Args:
        context: the open context.
        model: the reward model.
        base: what `parents.base_of` returned.
        arithmetic: float32 or bfloat16.
        copied_for: the arithmetic by which the base's copy is chosen, if that is another.
        merged: have a whole one in any case, its adapters merged, and rounded once.
    """
    import torch

    from rlhf_core.models.base import load_base
    from rlhf_core.models.loading import default_device, load_causal_lm
    from rlhf_core.models.lora import merge_adapters
    from rlhf_core.models.reward_model import RewardModel
    from rlhf_core.models.trunk import cast_weights, trunk_of

    directory, dtype = materialise(context, model), getattr(torch, arithmetic)
    if model.uri == base.uri:
        return RewardModel.from_pretrained(directory, dtype)
    if merged:
        whole = RewardModel.over(trunk_of(load_causal_lm(materialise(context, base), "float32")), directory)
        merge_adapters(whole.trunk)
        cast_weights(whole.trunk, dtype)  # the head stays as it is
        return whole
    copy = opened_base(context, base, copied_for or arithmetic)
    trunk = trunk_of(load_base(copy, arithmetic=dtype, device=default_device()))
    return RewardModel.over(trunk, directory)
