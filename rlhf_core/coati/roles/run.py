"""One run of `train_prompts_on_ray`, after its flags are known to be good."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rlhf_core.coati.roles.cluster import connected
from rlhf_core.coati.roles.loop import Groups, Outcome, Tell, processes_of, run_rounds, save
from rlhf_core.coati.roles.models import MODELS_DIR, check_kind
from rlhf_core.coati.roles.placement import decide
from rlhf_core.coati.roles.prompts import read_prompts
from rlhf_core.coati.roles.settings import RoleSettings
from rlhf_core.models.loading import find_local
from rlhf_core.strategy.factory import check_strategy

if TYPE_CHECKING:
    from rlhf_core.coati.roles.placement import Decision

_UNTRAINED = (
    "no --rm_pretrain: the reward model is an untrained head on a copy of --pretrain, as upstream's is; its scores "
    "mean nothing"
)


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
        from rlhf_core.coati.roles.spans import write_timeline  # noqa: PLC0415 - matplotlib, for this alone

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
