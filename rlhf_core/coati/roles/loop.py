"""A run of `train_prompts_on_ray`, after its flags are known to be good: rounds over four groups of actors.

A round draws, values, judges and learns; this process only calls.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from rlhf_core.coati.roles.cluster import connected
from rlhf_core.coati.roles.composition import ExperienceCompositionRefs, MadeArrays
from rlhf_core.coati.roles.flags import processes_of
from rlhf_core.coati.roles.groups import (
    PPOActorRayActorGroup,
    PPOCriticRayActorGroup,
    PPOInitialRayActorGroup,
    PPORayActorGroup,
    PPORewardRayActorGroup,
)
from rlhf_core.coati.roles.models import MODELS_DIR, check_kind
from rlhf_core.coati.roles.placement import Allotment, decide
from rlhf_core.coati.roles.prompts import read_prompts
from rlhf_core.coati.roles.settings import RoleSettings
from rlhf_core.coati.roles.spans import Span, write_timeline
from rlhf_core.coati.roles.waiting import results
from rlhf_core.counting import counted, ordinal
from rlhf_core.models.loading import find_local
from rlhf_core.ppo.episode import Position
from rlhf_core.ppo.loop import Collected, Loop
from rlhf_core.strategy.factory import check_strategy
from rlhf_core.types import Sample

if TYPE_CHECKING:
    from rlhf_core.coati.roles.placement import Decision
    from rlhf_core.ppo.metrics import PPOStats

Tell = Callable[[str], None]
_UNTRAINED = (
    "no --rm_pretrain: the reward model is an untrained head on a copy of --pretrain, as upstream's is; its scores "
    "mean nothing"
)


class Round(NamedTuple):
    """What came of one round of collecting and learning."""

    number: int
    """From 0."""
    samples: int
    actor: list[PPOStats]
    """Of each optimizer step; what concerns the critic is 0."""
    critic: list[PPOStats]
    """Of each optimizer step; what concerns the actor is 0."""


class LearntRound(NamedTuple):
    """What a round was learnt from, and what it came to."""

    samples: list[Sample]
    actor: list[PPOStats]
    critic: list[PPOStats]


@dataclass
class Outcome:
    """What a run leaves behind, besides its files."""

    rounds: list[Round] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    """When each process was busy, by the clock of its machine."""
    written: list[str] = field(default_factory=list)
    """Paths of the policy, and of its optimizer's state."""


class Groups:
    """The four groups of one run.

    Args:
        args: the flags.
        allotment: what each process gets.

    Raises:
        TimeoutError: if there is no room for one; nothing of the run is left then.
    """

    actor: PPOActorRayActorGroup
    critic: PPOCriticRayActorGroup
    initial: PPOInitialRayActorGroup
    reward: PPORewardRayActorGroup

    def __init__(self, args: Namespace, allotment: Allotment) -> None:
        self._timeouts = (args.start_timeout_s, args.timeout_s)
        self.all: list[PPORayActorGroup] = []
        options: dict[str, Any] = {"allotment": allotment, "timeout_s": args.start_timeout_s}
        per_node = args.num_gpus_per_node
        try:
            self.actor = self._kept(PPOActorRayActorGroup(args.num_actor_nodes, per_node, **options))
            self.critic = self._kept(PPOCriticRayActorGroup(args.num_critic_nodes, per_node, **options))
            self.initial = self._kept(PPOInitialRayActorGroup(args.num_initial_nodes, per_node, **options))
            self.reward = self._kept(PPORewardRayActorGroup(args.num_reward_nodes, per_node, **options))
            for group in self.all:
                self.results(group, group.async_ping(), "to start", self._timeouts[0], advice=group.room.lacking())
        except BaseException:
            self.end()
            raise

    @property
    def members(self) -> dict[str, Any]:
        """All processes by name."""
        return {name: actor for group in self.all for name, actor in zip(group.names, group.actors, strict=True)}

    def load(self, settings: RoleSettings, prompts: Sequence[str]) -> int:
        """Have all load their models, and the actor its prompts; return how many of these were cut."""
        calls = {
            call: name
            for group in self.all
            for name, call in zip(group.names, group.async_init_model_from_pretrained(settings), strict=True)
        }
        self.answers(calls, "to load the models")
        cut: list[int] = self.results(self.actor, self.actor.async_set_prompts(prompts), "to encode the prompts")
        return cut[0]

    def answers(self, calls: dict[Any, str], what: str) -> list[Any]:
        """Return what calls return."""
        return results(calls, members=self.members, timeout_s=self._timeouts[1], what=what)

    def results(
        self, group: PPORayActorGroup, calls: Sequence[Any], what: str, timeout_s: float | None = None, advice: str = ""
    ) -> list[Any]:
        """Return what a group's calls return, one of each process."""
        named = dict(zip(calls, group.names, strict=True))
        limit = self._timeouts[1] if timeout_s is None else timeout_s
        return results(named, members=self.members, timeout_s=limit, what=what, advice=advice)

    def end(self) -> None:
        """End all processes of the run, and nobody else's."""
        while self.all:
            self.all.pop().end()

    def _kept(self, group: Any) -> Any:
        self.all.append(group)
        return group


class RoundLearner:
    """The learner of `Loop`: the processes of the actor and the critic, which learn a round's experience together."""

    def __init__(self, groups: Groups) -> None:
        self.position = Position()
        self._groups = groups
        self._made: dict[Any, str] = {}

    @property
    def has_begun(self) -> bool:
        """Whether a round's experience is taken in, and not learnt yet."""
        return bool(self._made)

    def begin(self, made: dict[Any, str], _: Sequence[Sample], /) -> None:
        """Take in a round's experience: references, and who made each. Nobody has handed over the samples yet."""
        self._made = made

    def learn(self, _passes: int) -> list[LearntRound]:
        """Have it learnt, as often as each process was told at its start."""
        actor, critic = self._groups.actor, self._groups.critic
        number = self.position.episode
        calls = [call for each in (actor, critic) for call in each.async_learn_on_experiences([*self._made], number)]
        found = self._groups.answers(dict(zip(calls, actor.names + critic.names, strict=True)), "to learn")
        collected: list[MadeArrays] = self._groups.answers(self._made, "to hand over experience")
        samples = [sample for each in collected for sample in each.samples]
        return [LearntRound(samples, found[0], found[actor.world_size])]

    def finish(self) -> None:
        """Forget the round."""
        self._made = {}
        self.position.episode += 1


def run(
    args: Namespace, tell: Tell, on_cluster: Callable[[Namespace], AbstractContextManager[Any]] = nullcontext
) -> Outcome:
    """Train, write the policy, and return what came of it; of the run's actors none is left, whatever happens.

    Args:
        args: the flags.
        tell: takes a line.
        on_cluster: is given the flags; the actors live in its context, which may connect to a cluster.

    Raises:
        RlhfError: a file or model is not what it should be, an actor has ended, or training cannot go on.
        TimeoutError: something did not come in time; it is named.
    """
    prompts = read_prompts(args.prompt_csv_url)
    args = _with_absolute_paths(args)
    _check_pretrain(args)
    with on_cluster(args), connected(args):
        placed = _placed(args)
        check_strategy(args.strategy, precision=args.mixed_precision, cuda=placed.allotment.gpus > 0)
        for line in (placed.line, "" if args.rm_pretrain else _UNTRAINED):
            if line:
                tell(line)
        groups = Groups(args, placed.allotment)
        try:
            return _train(args, groups, prompts, tell)
        finally:
            groups.end()


def _train(args: Namespace, groups: Groups, prompts: list[str], tell: Tell) -> Outcome:
    cut = groups.load(RoleSettings.from_args(args), prompts)
    if cut:
        tell(f"prompts longer than {args.max_prompt_tokens} tokens, whose ends are cut off: {cut} of {len(prompts)}")
    outcome = Outcome(rounds=run_rounds(args, groups, tell))
    outcome.written = save(args, groups)
    tell(f"stored {' and '.join(outcome.written)}")
    for group in groups.all:
        outcome.spans += [span for spans in groups.results(group, group.async_spans(), "to tell") for span in spans]
    if args.timeline:
        write_timeline(outcome.spans, Path(args.timeline))
        tell(f"drew {args.timeline}")
    return outcome


def _check_pretrain(args: Namespace) -> None:
    """See, before anything is started, that the policy is of the kind that was asked for; the hub is not asked."""
    directory = find_local(args.pretrain, models_dir=MODELS_DIR.expanduser())
    if directory is not None:
        check_kind(directory, args.pretrain, args.model)


def _placed(args: Namespace) -> Decision:
    gpus = float(ray.cluster_resources().get("GPU", 0.0))
    return decide(processes_of(args), gpus=gpus, told=args.gpus_per_actor, threads=args.threads)


def _with_absolute_paths(args: Namespace) -> Namespace:
    """Return the flags with paths that the actors find too: their working directory is another."""
    paths = {name: getattr(args, name) for name in ("pretrain", "rm_pretrain")}
    whole = {name: str(Path(path).absolute()) for name, path in paths.items() if path and Path(path).is_dir()}
    return Namespace(**vars(args) | whole | {"save_path": str(Path(args.save_path).expanduser().absolute())})


def run_rounds(args: Namespace, groups: Groups, tell: Tell) -> list[Round]:
    """Run all rounds, and return them.

    A round is `--update_timesteps` time steps; the last one has what is left. All of its calls are made at once: the
    actor draws the next time step while the others work on the one before.
    """
    steps = range(args.num_episodes * args.max_timesteps)
    starts = steps[:: args.update_timesteps]
    rounds: list[Round] = []
    began = time.monotonic()

    def collect(number: int) -> Collected:
        due = steps[starts[number] :][: args.update_timesteps]
        return Collected(_assembled(groups, _composed(groups, due, number)), [])

    def keep(number: int, learnt: Sequence[LearntRound]) -> None:
        nonlocal began
        [(samples, actor, critic)] = learnt
        before, began = began, time.monotonic()
        rounds.append(Round(number, len(samples), actor, critic))
        tell(_line(rounds[-1], samples, len(starts), began - before))

    Loop(RoundLearner(groups), collect=collect, keep=keep).run(len(starts), args.max_epochs)
    return rounds


def _composed(groups: Groups, steps: Sequence[int], number: int) -> list[ExperienceCompositionRefs]:
    """Ask for all that a round's experience is made of, and return the references when it is there."""
    found = []
    asked: dict[Any, str] = {}
    for step in steps:
        made = groups.actor.async_sample_prompts_and_make_sequence(step, number)
        parts = (
            made,
            groups.actor.async_calculate_action_log_probs(made),
            groups.initial.async_calculate_base_action_log_probs(made),
            groups.critic.async_calculate_value(made),
            groups.reward.async_calculate_r(made),
        )
        found += [ExperienceCompositionRefs(*each) for each in zip(*parts, strict=False)]  # idle ranks have no part
        for group, calls in zip(
            (groups.actor, groups.actor, groups.initial, groups.critic, groups.reward), parts, strict=True
        ):
            asked |= dict(zip(calls, cycle(group.names), strict=False))
    groups.answers(asked, "to draw, value and judge")
    return found


def _assembled(groups: Groups, composed: Sequence[ExperienceCompositionRefs]) -> dict[Any, str]:
    """Have the experience assembled by all processes of all roles in turns; return when it is there.

    Returns:
        The references, in the order of time steps and of the actor's ranks, and who assembled each.
    """
    turns = cycle([(group, rank) for group in groups.all for rank in range(group.world_size)])
    made = {}
    for refs, (group, rank) in zip(composed, turns, strict=False):
        made[group.async_make_experience(refs, rank)] = group.names[rank]
    groups.answers(made, "to make experience")
    return made


def save(args: Namespace, groups: Groups) -> list[str]:
    """Have the policy written, and return the paths."""
    calls = groups.actor.async_save_checkpoint(args.save_path, args.need_optim_ckpt)
    written: list[str] = groups.results(groups.actor, calls, "to write the policy")[0]
    return written


def _line(done: Round, samples: Sequence[Sample], rounds: int, seconds: float) -> str:
    judged = [sample for sample in samples if not sample.abstains] or samples
    return (
        f"round {ordinal(done.number)}/{rounds}: {counted(len(samples), 'sample')}, score "
        f"{fmean(s.score for s in judged):.4f}, KL {fmean(s.kl for s in judged):z.4f}, "
        f"{fmean(s.length for s in samples):.1f} tokens, actor loss {fmean(s.actor_loss for s in done.actor):.4f}, "
        f"critic loss {fmean(s.critic_loss for s in done.critic):.4f}, {seconds:.1f} s"
    )
