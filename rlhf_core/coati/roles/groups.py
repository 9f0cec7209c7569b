"""The four groups, as the driver calls them: each call goes to the ranks it concerns, and returns references."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray

from rlhf_core.coati.roles.composition import ExperienceCompositionRefs
from rlhf_core.coati.roles.placement import Allotment, Room
from rlhf_core.coati.roles.roles import RayPPOActor, RayPPOCritic, RayPPOInitialModel, RayPPORewardModel
from rlhf_core.coati.roles.settings import RoleSettings
from rlhf_core.coati.roles.waiting import results
from rlhf_core.ray_tools.calls import within

logger = logging.getLogger(__name__)

START_S = 120.0
END_S = 10.0
"""Longest wait for Ray to end a group's processes: with its control server gone it would not return."""


class PPORayActorGroup:
    """The processes of one role.

    Args:
        num_nodes: machines that they are on.
        num_gpus_per_node: processes on each.
        ray_actor_type: of each process.
        allotment: what each gets of the cluster; None is a GPU and a thread, as upstream has it.
        timeout_s: longest wait for room, and for the first process.

    Raises:
        TimeoutError: if there is no room, or the first process does not answer.
    """

    def __init__(
        self,
        num_nodes: int,
        num_gpus_per_node: int,
        ray_actor_type: Any,
        *,
        allotment: Allotment | None = None,
        timeout_s: float = START_S,
    ) -> None:
        self.role: str = ray_actor_type.__ray_metadata__.modified_class.role
        self.world_size = num_nodes * num_gpus_per_node
        allotment = allotment or Allotment(1, 1.0)
        self.room = Room(self.role, num_nodes, num_gpus_per_node, allotment, timeout_s=timeout_s)
        # On one machine nobody else's business: the ranks believe whoever speaks to them.
        address, port = ("127.0.0.1" if num_nodes == 1 else None), None
        self.actors: list[Any] = []
        try:
            for rank in range(self.world_size):
                actor_type: Any = ray_actor_type.options(**self.room.options(rank))
                self.actors.append(actor_type.remote(self.world_size, rank, rank % num_gpus_per_node, address, port))
                if rank == 0 and self.world_size > 1:
                    address, port = self._rendezvous_address(timeout_s)
        except BaseException:
            self.end()
            raise

    @property
    def names(self) -> list[str]:
        """What its processes are called in lines and errors."""
        return [f"{self.role}-{rank}" for rank in range(self.world_size)]

    def async_ping(self) -> list[Any]:
        """Ask every process for a sign of life."""
        return [actor.ping.remote() for actor in self.actors]

    def async_init_model_from_pretrained(self, settings: RoleSettings) -> list[Any]:
        """Have every process load its model."""
        return [actor.init_model_from_pretrained.remote(settings) for actor in self.actors]

    def async_spans(self) -> list[Any]:
        """Ask every process when it was busy."""
        return [actor.spans.remote() for actor in self.actors]

    def async_make_experience(self, refs: ExperienceCompositionRefs, rank: int) -> Any:
        """Have one process assemble the experience of one batch."""
        return self.actors[rank].make_experience.remote(refs)

    def end(self) -> None:
        """End its processes, and give their room back; if Ray does not answer, they end with this process."""
        try:
            within(END_S, self._end)
        except TimeoutError:
            logger.warning("Ray did not end the %s group within %.0f s", self.role, END_S)

    def _end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.room.leave()

    def _rendezvous_address(self, timeout_s: float) -> tuple[str, int]:
        first = f"{self.role}-0"
        calls = {self.actors[0].get_master_addr_port.remote(): first}
        (place,) = results(calls, members={first: self.actors[0]}, timeout_s=timeout_s, what="to start")
        address, port = place
        return address, port


class TrainableModelRayActorGroup(PPORayActorGroup):
    """The processes of a role that learns."""

    def async_learn_on_experiences(self, experience_refs: Sequence[Any], round_number: int) -> list[Any]:
        """Have all of them learn a round's experience together.

        Every rank is given all of it, and learns its share of each minibatch: which rank drew or assembled a row
        decides nothing.
        """
        return [actor.learn_on_experiences.remote(list(experience_refs), round_number) for actor in self.actors]


class PPOActorRayActorGroup(TrainableModelRayActorGroup):
    """The policy's processes: all of them draw in every time step.

    Args:
        num_nodes: as for `PPORayActorGroup`, as are the others.
        num_gpus_per_node: processes on each.
        **options: `allotment`, `timeout_s`.
    """

    def __init__(self, num_nodes: int, num_gpus_per_node: int, **options: Any) -> None:
        super().__init__(num_nodes, num_gpus_per_node, RayPPOActor, **options)

    def async_set_prompts(self, texts: Sequence[str]) -> list[Any]:
        """Give all of them the prompts, sent once."""
        sent = ray.put(list(texts))
        return [actor.set_prompts.remote(sent) for actor in self.actors]

    def async_sample_prompts_and_make_sequence(self, step: int, round_number: int) -> list[Any]:
        """Have each draw responses to its own prompts of a time step."""
        return [actor.sample_prompts_and_make_sequence.remote(step, round_number) for actor in self.actors]

    def async_calculate_action_log_probs(self, made: Sequence[Any]) -> list[Any]:
        """Have each say what it thinks of the responses that it drew."""
        return [actor.calculate_action_log_probs.remote(own) for actor, own in zip(self.actors, made, strict=True)]

    def async_save_checkpoint(self, save_path: str, should_save_optimizer: bool) -> list[Any]:
        """Have them write the policy together."""
        return [actor.save_checkpoint.remote(save_path, should_save_optimizer) for actor in self.actors]


class PPOCriticRayActorGroup(TrainableModelRayActorGroup):
    """The critic's processes.

    Args:
        num_nodes: as for `PPORayActorGroup`, as are the others.
        num_gpus_per_node: processes on each.
        **options: `allotment`, `timeout_s`.
    """

    def __init__(self, num_nodes: int, num_gpus_per_node: int, **options: Any) -> None:
        super().__init__(num_nodes, num_gpus_per_node, RayPPOCritic, **options)

    def async_calculate_value(self, made: Sequence[Any]) -> list[Any]:
        """Have the batches of one time step valued, in turns; a reference for each batch, then of each idle rank.

        Ranks without a batch are called all the same: where weights are sharded, they gather them together.
        """
        found: list[Any] = [None] * max(len(made), self.world_size)
        for rank, actor in enumerate(self.actors):
            own = range(rank, len(found), self.world_size)
            batches = made[rank :: self.world_size]
            answer = actor.calculate_value.options(num_returns=len(own)).remote(*batches)
            for place, reference in zip(own, [answer] if len(own) == 1 else answer, strict=True):
                found[place] = reference
        return found


class PPOInitialRayActorGroup(PPORayActorGroup):
    """The initial model's processes: each works for itself.

    Args:
        num_nodes: as for `PPORayActorGroup`, as are the others.
        num_gpus_per_node: processes on each.
        **options: `allotment`, `timeout_s`.
    """

    def __init__(self, num_nodes: int, num_gpus_per_node: int, **options: Any) -> None:
        super().__init__(num_nodes, num_gpus_per_node, RayPPOInitialModel, **options)

    def async_calculate_base_action_log_probs(self, made: Sequence[Any]) -> list[Any]:
        """Have each batch's responses thought about, in turns; a reference for each batch."""
        turns = (self.actors[place % self.world_size] for place in range(len(made)))
        return [actor.calculate_base_action_log_probs.remote(each) for actor, each in zip(turns, made, strict=True)]


class PPORewardRayActorGroup(PPORayActorGroup):
    """The reward model's processes: each works for itself.

    Args:
        num_nodes: as for `PPORayActorGroup`, as are the others.
        num_gpus_per_node: processes on each.
        **options: `allotment`, `timeout_s`.
    """

    def __init__(self, num_nodes: int, num_gpus_per_node: int, **options: Any) -> None:
        super().__init__(num_nodes, num_gpus_per_node, RayPPORewardModel, **options)

    def async_calculate_r(self, made: Sequence[Any]) -> list[Any]:
        """Have each batch's responses scored, in turns; a reference for each batch."""
        turns = (self.actors[place % self.world_size] for place in range(len(made)))
        return [actor.calculate_r.remote(each) for actor, each in zip(turns, made, strict=True)]
