"""What every process of the four groups is: a Ray actor that meets its group, holds one model, says when it works."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import ray
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from rlhf_core.coati.generate_kwargs import generation_settings_from_kwargs
from rlhf_core.coati.roles.composition import PARTS, ExperienceCompositionRefs, ExperienceMaker, MadeArrays, packed
from rlhf_core.coati.roles.models import load_policy_tokenizer
from rlhf_core.coati.roles.settings import RoleSettings
from rlhf_core.coati.roles.spans import Span, Spans
from rlhf_core.coati.strategy import make_strategy
from rlhf_core.config import TemplateConfig
from rlhf_core.counting import ordinal
from rlhf_core.data import PromptTemplate
from rlhf_core.models.loading import default_device
from rlhf_core.ppo.episode import learn_episode
from rlhf_core.ppo.failed_batch import keep_in
from rlhf_core.ppo.learner import PPOLearner, PPOStats
from rlhf_core.ppo.order import in_key_order
from rlhf_core.ray_tools.group import GroupMember
from rlhf_core.strategy.ranks import current_ranks
from rlhf_core.strategy.rendezvous import Rendezvous
from rlhf_core.training.optim import BETAS, Trained, warmup_then_constant


class DistributedTorchRayActor(GroupMember):
    """One process of a group that computes with PyTorch together.

    Args:
        world_size: processes of the group.
        rank: of this one, from 0.
        local_rank: among those of its machine.
        master_addr: where the group meets; None on the first rank takes the address of its machine.
        master_port: None on the first rank takes a free one; it is held from here on.
    """

    def __init__(
        self, world_size: int, rank: int, local_rank: int, master_addr: str | None, master_port: int | None
    ) -> None:
        self._world_size, self._rank, self._local_rank = world_size, rank, local_rank
        self._address, self._port = master_addr or "", master_port or 0
        if rank == 0 and world_size > 1:
            self._address = master_addr or ray.util.get_node_ip_address()
            self._port = self._open(self._address, self._port)

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def get_master_addr_port(self) -> tuple[str, int]:
        """Return where the group meets, which the other ranks are made with."""
        return self._address, self._port

    def _join_group(self, timeout_s: float) -> None:
        """Come together with the other ranks, which wait for this one."""
        if self._world_size > 1:
            self._join(Rendezvous(self._rank, self._world_size, self._address, self._port), timeout_s)


class BasePPORole(DistributedTorchRayActor, ABC):
    """Holds one of the four models, and may assemble experience."""

    role: ClassVar[str] = "role"
    """Names it in lines, errors and pictures."""

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def init_model_from_pretrained(self, settings: RoleSettings) -> None:
        """Load the model; apart from `__init__`, whose errors Ray garbles.

        Args:
            settings: of the run.

        Raises:
            RlhfError: if a model is not what it should be, or another rank does not come.
        """
        self._spans = Spans(self.role, self._rank)
        with self._at("load"):
            self._settings, self._device = settings, default_device()
            self._tokenizer = load_policy_tokenizer(settings)
            self._template = PromptTemplate(self._tokenizer, TemplateConfig())
            self._generation = generation_settings_from_kwargs(settings.generate_kwargs, self._tokenizer)
            self._config = settings.rollout(self._generation)
            self._maker = ExperienceMaker(settings.kl_coef, options=settings.options, timeout_s=settings.timeout_s)
            self._load()

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def make_experience(self, refs: ExperienceCompositionRefs) -> MadeArrays:
        """Return the experience of one batch of responses.

        Args:
            refs: what the four models contributed.

        Raises:
            TimeoutError: if one does not come in time.
        """
        limit_s = self._settings.timeout_s
        _, late = ray.wait(refs.all(), num_returns=len(refs.all()), timeout=limit_s)
        if late:
            awaited = [name for name, each in zip(PARTS, refs.all(), strict=True) if each in late]
            raise TimeoutError(
                f"waited {limit_s:.0f} s for {', '.join(awaited)} of one batch, which did not come; raise "
                "--timeout_s, or look into the cluster's logs"
            )
        with self._at("assemble"):
            return packed(self._maker.make_experience(refs))

    @ray.method(concurrency_group="status")  # type: ignore[untyped-decorator]
    def spans(self) -> list[Span]:
        """Return when this process was busy."""
        return list(self._spans.kept)

    @abstractmethod
    def _load(self) -> None:
        """Load the model; the settings, the device and the tokenizer are there."""

    @contextmanager
    def _at(self, what: str) -> Iterator[None]:
        """Run a block of work: what it fails with is kept for whoever asks, and when it ran."""
        with self._working(), self._spans.busy(what):
            yield


class TrainablePPORole(BasePPORole):
    """Holds a model that learns, with the other ranks of its group, from experience that all of them are given."""

    _learner: PPOLearner

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def learn_on_experiences(self, experience_refs: Sequence[Any], round_number: int) -> list[PPOStats]:
        """Learn what a round collected, and return each step's numbers.

        Args:
            experience_refs: of `MadeArrays`, all of the round, the same on every rank; of each minibatch the rank
                learns its share.
            round_number: from 0; with the seed it decides the order of passes after the first.
        """
        settings = self._settings
        found: list[MadeArrays] = ray.get(list(experience_refs), timeout=settings.timeout_s)
        with self._at("learn"):
            batches = [each.unpacked() for each in found]
            samples = [sample for _, each in batches for sample in each]
            keep = keep_in(Path(settings.save_path).parent, f"round-{ordinal(round_number)}/{self.role}-{self._rank}")
            return learn_episode(
                self._learner, in_key_order(batches), samples, seed=settings.seed, episode=round_number, keep=keep
            )

    def _load(self) -> None:
        settings = self._settings
        self._join_group(settings.timeout_s)
        self._ranks = current_ranks()
        self._strategy = make_strategy(
            settings.strategy,
            precision=settings.precision,
            max_norm=settings.grad_clip,
            seed=settings.seed,
            device=self._device,
            timeout_s=settings.timeout_s,
        )
        with self._strategy.model_init_context():
            self._trained = self._prepared(self._new_model())
        actor, critic = (self._trained if self.role == role else None for role in ("actor", "critic"))
        self._learner = PPOLearner(
            actor,
            critic,
            settings.learning(self._generation, self._world_size),
            device=self._device,
            ranks=self._ranks if self._world_size > 1 else None,
            seed=settings.seed,
            max_new_tokens=self._generation.max_new_tokens,
            apart=True,
        )

    @abstractmethod
    def _new_model(self) -> nn.Module:
        """Return the model that is to be trained, in float32."""

    @abstractmethod
    def _learning_rate(self) -> float: ...

    def _prepared(self, model: nn.Module) -> Trained:
        strategy = self._strategy
        optimizer = strategy.new_optimizer(model.parameters(), lr=self._learning_rate(), betas=BETAS)
        schedule = LambdaLR(optimizer, warmup_then_constant(0))
        made = strategy.prepare({"model": model, "optimizer": optimizer, "lr_scheduler": schedule})
        return Trained(made["model"], made["optimizer"], made["lr_scheduler"], strategy.booster_of(made["model"]))
