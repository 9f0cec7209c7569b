"""Gemini on this rank's share of eight rows; alone, a plain booster on all of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from rlhf_core.models.critic import Critic
from rlhf_core.models.reward_model import RewardModel
from rlhf_core.models.trunk import checkpoint_gradients
from rlhf_core.strategy.booster import TrainedState
from rlhf_core.strategy.optimizer import GradientError
from rlhf_core.strategy.plain import PlainBooster, PlainOptimizer
from rlhf_core.strategy.ranks import ALONE, Ranks
from tests.parallel.held import held_bytes
from tests.parallel.ranks import Found
from tests.tiny_llama import tiny_llama

DEVICE = os.environ.get("CASES_DEVICE", "cpu")
STEPS, ROWS, WIDTH, MICRO = 5, 8, 12, 2
LR, HEAD_LR, DECAY, CLIP = 1e-3, 1e-2, 0.1, 0.5
BETAS = (0.9, 0.95)


def booster_of(ranks: Ranks, precision: str, **options: Any) -> Any:
    if ranks.world_size == 1 and not torch.distributed.is_initialized():
        kind = {"fp32": PlainBooster, "bf16": RoundedBooster}[precision]
        return kind(precision, CLIP, ranks)  # type: ignore[arg-type]
    from rlhf_core.strategy.colossal.gemini import GeminiBooster

    return GeminiBooster(precision, CLIP, ranks, **options)  # type: ignore[arg-type]


def model_of(kind: str, seed: int) -> nn.Module:
    llama = tiny_llama(initializer_range=0.2, seed=seed)
    if kind == "lm":
        return llama.to(DEVICE)
    made: nn.Module = {"critic": Critic, "reward_model": RewardModel}[kind].from_causal_lm(llama)  # type: ignore[attr-defined]
    nn.init.normal_(made.head.weight, std=0.1, generator=torch.Generator().manual_seed(seed))  # type: ignore[union-attr]
    return made.to(DEVICE)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, biases and norms do not; a head has a rate of its own."""
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        key = (HEAD_LR if name.startswith("head") else LR, DECAY if parameter.ndim > 1 else 0.0)
        found.setdefault(key, []).append(parameter)
    return [{"params": members, "lr": lr, "weight_decay": decay} for (lr, decay), members in found.items()]


class RoundedBooster(PlainBooster):
    """What Gemini computes in bf16, in plain PyTorch: weights and gradients are rounded, masters are not."""

    def boost(self, model: nn.Module, optimizer: Any = None, *others: Any, lr_scheduler: Any = None) -> Any:
        self.masters, working = model, copy.deepcopy(model)
        for weight in working.parameters():
            weight.data = weight.data.bfloat16()
        return working, RoundedOptimizer(optimizer, model, working), *(others or (None, None)), lr_scheduler

    def state(self, model: nn.Module, optimizer: Any) -> TrainedState:  # noqa: ARG002
        return super().state(self.masters, optimizer)


class RoundedOptimizer(PlainOptimizer):
    def __init__(self, optim: torch.optim.Optimizer, masters: nn.Module, working: nn.Module) -> None:
        super().__init__(optim, max_norm=CLIP, ranks=ALONE)
        self.pairs = list(zip(masters.parameters(), working.parameters(), strict=True))

    def step(self, max_norm: float | None = None) -> None:
        for master, weight in self.pairs:
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        super().step(max_norm)
        for master, weight in self.pairs:
            weight.data.copy_(master.data)


class Run:
    """A model, what trains it, and its data."""

    def __init__(
        self, ranks: Ranks, kind: str = "lm", precision: str = "fp32", *, booster: Any = None, seed: int = 0
    ) -> None:
        self.ranks, self.kind = ranks, kind
        self.booster = booster_of(ranks, precision) if booster is None else booster
        model = model_of(kind, seed=seed + ranks.rank)  # every rank begins elsewhere: the booster makes them equal
        optimizer = self.booster.new_optimizer(groups_of(model), betas=BETAS)
        schedule = LambdaLR(optimizer, lambda step: (step + 1) / (STEPS + 1))
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(model, optimizer, lr_scheduler=schedule)

    def micros(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and mask of this rank's rows, two at a time; rows differ in length, and so do the ranks' tokens."""
        draw = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(3, 250, (ROWS, WIDTH), generator=draw)
        lengths = torch.randint(4, WIDTH + 1, (ROWS, 1), generator=draw)
        mask = torch.arange(WIDTH) < lengths
        mine = slice(self.ranks.rank, None, self.ranks.world_size)
        yield from zip(ids[mine].to(DEVICE).split(MICRO), mask[mine].to(DEVICE).split(MICRO), strict=True)

    def figures(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the rows' losses, and how many terms it has."""
        with torch.autocast(DEVICE, self.booster.autocast_dtype, enabled=self.booster.autocast_dtype != torch.float32):
            if self.kind == "lm":
                logits = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
            else:
                logits = self.model(ids, mask)
        if self.kind == "lm":
            labels = torch.where(mask, ids, -100)[:, 1:]
            losses = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels.flatten(), reduction="sum")
            return losses, (labels >= 0).sum()
        wanted = torch.where(mask, ids / 250, 0.0) if self.kind == "critic" else ids[:, 0] / 250
        seen = mask if self.kind == "critic" else torch.ones_like(wanted, dtype=torch.bool)
        return (torch.where(seen, logits - wanted, 0.0) ** 2).sum(), seen.sum()

    def evaluated(self, step: int) -> float:
        """Mean loss of a pass without gradients."""
        self.model.eval()
        with torch.no_grad():
            found = torch.stack([torch.stack(self.figures(*micro)).double() for micro in self.micros(step)]).sum(0)
        self.model.train()
        total, count = self.ranks.sum(found).tolist()
        return float(total / count)

    def backward(self, step: int) -> float:
        """Add gradients of all micro-batches; return the mean loss over all ranks."""
        mine = torch.stack([(torch.where(mask, ids, -100)[:, 1:] >= 0).sum() for ids, mask in self.micros(step)])
        counts = {"lm": mine.sum(), "critic": sum(mask.sum() for _, mask in self.micros(step))}
        counts["reward_model"] = torch.tensor(ROWS // self.ranks.world_size)
        terms = self.ranks.sum(torch.as_tensor(counts[self.kind])).item()
        total = torch.zeros(())
        for micro in self.micros(step):
            loss, _ = self.figures(*micro)
            self.booster.backward(loss / terms * self.ranks.world_size, self.optimizer)
            total += loss.detach().cpu()
        return self.ranks.sum(total).item() / terms

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step, a pass without gradients before it, as PPO has one."""
        before = self.evaluated(step)
        loss = self.backward(step)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return {f"{step}.before": before, f"{step}.loss": loss, f"{step}.norm": self.optimizer.get_grad_norm()}


def state_of(run: Run) -> dict[str, Tensor]:
    weights, moments = run.booster.state(run.model, run.optimizer)
    return {f"weights.{name}": tensor for name, tensor in weights.items()} | {
        f"{moment}.{name}": tensor for moment, held in moments.items() for name, tensor in held.items()
    }


@cache
def alone(kind: str, precision: str) -> Found:
    """What a plain booster finds on all rows."""
    return steps(ALONE, kind, precision)


def steps(ranks: Ranks, kind: str, precision: str) -> Found:
    run = Run(ranks, kind, precision)
    tensors = {f"start.{name}": tensor for name, tensor in state_of(run).items()}
    numbers = {}
    for step in range(STEPS):
        numbers |= run.step(step)
        if step == 0:
            tensors |= {f"first.{name}": tensor for name, tensor in state_of(run).items()}
    return Found(numbers, tensors | {f"last.{name}": tensor for name, tensor in state_of(run).items()})


def held(ranks: Ranks, precision: str) -> Found:
    """Bytes that come with the model, its gradients and its moments; and while its twin is awake, and afterwards."""
    before = held_bytes()
    run = Run(ranks, "reward_model", precision)
    numbers = {"weights": held_bytes() - before}
    run.backward(0)
    numbers["gradients"] = held_bytes() - before - numbers["weights"]
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.evaluated(1)  # whatever held on to a shard while it was gathered, has its own now
    numbers["moments"] = held_bytes() - before - numbers["weights"]
    before = held_bytes()
    with run.booster.awake(run.model):
        numbers["awake"] = held_bytes() - before
    numbers["asleep"] = held_bytes() - before
    with run.booster.exact(run.model) as whole:
        numbers["exact"] = held_bytes() - before
    del whole
    numbers["afterwards"] = held_bytes() - before
    return Found({name: float(number) for name, number in numbers.items()})


def awake(ranks: Ranks, precision: str) -> Found:
    """The twin says what the model says, and only while it is awake."""
    run = Run(ranks, precision=precision)
    run.step(0)
    run.model.eval()
    twin = run.booster.plain(run.model)
    (ids, mask), *_ = run.micros(1)
    asleep = twin(input_ids=ids, attention_mask=mask.long()).logits
    with torch.no_grad():
        boosted = run.model(input_ids=ids, attention_mask=mask.long()).logits
        with run.booster.awake(run.model):
            with run.booster.awake(run.model):
                pass
            same = torch.equal(twin(input_ids=ids, attention_mask=mask.long()).logits, boosted)
            written = twin.generate(input_ids=ids[:1, :4], max_new_tokens=3, do_sample=False)
    return Found({"same": same, "asleep": asleep.isnan().all().item(), "written": written.shape[1]})


def saved(ranks: Ranks, precision: str, directory: str) -> Found:
    """Three steps, files, and two steps more."""
    run = Run(ranks, "critic", precision)
    for step in range(3):
        run.step(step)
    write(run, directory)
    tensors = {f"written.{name}": tensor for name, tensor in state_of(run).items()}
    numbers = run.step(3) | run.step(4)
    return Found(numbers, tensors | {f"last.{name}": tensor for name, tensor in state_of(run).items()})


def write(run: Run, directory: str) -> None:
    run.booster.save_model(run.model, f"{directory}/model.safetensors")
    run.booster.save_optimizer(run.optimizer, f"{directory}/optimizer.safetensors")
    run.booster.save_lr_scheduler(run.scheduler, f"{directory}/schedule.json")


def read(run: Run, directory: str) -> None:
    run.booster.load_model(run.model, f"{directory}/model.safetensors")
    run.booster.load_optimizer(run.optimizer, f"{directory}/optimizer.safetensors")
    run.booster.load_lr_scheduler(run.scheduler, f"{directory}/schedule.json")


def resumed(ranks: Ranks, precision: str, directory: str) -> Found:
    """Another model reads the files, and takes the two steps."""
    run = Run(ranks, "critic", precision, seed=5)
    run.step(0)
    read(run, directory)
    tensors = {f"written.{name}": tensor for name, tensor in state_of(run).items()}
    numbers = run.step(3) | run.step(4)
    return Found(numbers, tensors | {f"last.{name}": tensor for name, tensor in state_of(run).items()})


def through_zero(ranks: Ranks, precision: str) -> Found:
    """A state goes to ZeRO and comes back; then a step is taken."""
    from rlhf_core.strategy.colossal.zero import ZeroBooster

    first = Run(ranks, precision=precision)
    first.step(0)
    zero = Run(ranks, booster=ZeroBooster(precision, CLIP, ranks), seed=5)  # type: ignore[arg-type]
    hand_over(first, zero)
    again = Run(ranks, precision=precision, seed=6)
    hand_over(zero, again)
    same = equal(state_of(first), state_of(zero)) and equal(state_of(first), state_of(again))
    first.step(1)
    again.scheduler.load_state_dict(first.scheduler.state_dict() | {"last_epoch": 0})
    for group, other in zip(again.optimizer.param_groups, first.optimizer.param_groups, strict=True):
        group["lr"] = other["initial_lr"] * 2 / (STEPS + 1)
    again.step(1)
    return Found({"same": same, "goes on": equal(state_of(first), state_of(again))})


def hand_over(giver: Run, taker: Run) -> None:
    """Let every rank load the state that the first rank has."""
    state = giver.booster.state(giver.model, giver.optimizer)
    flat = {("", name): tensor for name, tensor in state.weights.items()} | {
        (moment, name): tensor for moment, held in state.moments.items() for name, tensor in held.items()
    }
    found = {}
    for moment, name, *shape in giver.ranks.broadcast_object([[*key, *flat[key].shape] for key in flat]):
        found[moment, name] = flat.get((moment, name), torch.zeros(shape))
        giver.ranks.broadcast(found[moment, name])
    moments: dict[str, dict[str, Tensor]] = {}
    for (moment, name), tensor in found.items():
        moments.setdefault(moment, {})[name] = tensor
    taker.booster.load_state(taker.model, taker.optimizer, TrainedState(moments.pop(""), moments))


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def nan_on_one_rank(run: Run) -> None:
    for ids, mask in run.micros(3):
        loss, _ = run.figures(ids, mask)
        run.booster.backward(loss * (float("nan") if run.ranks.rank == 1 else 1.0), run.optimizer)
    before = state_of(run)
    with pytest.raises(GradientError, match="norm is nan"):
        run.optimizer.make_ready()
    assert equal(before, state_of(run))


def left_out(run: Run) -> None:
    run.backward(3)
    run.optimizer.zero_grad()


def ready_and_left_out(run: Run) -> None:
    run.backward(3)
    run.optimizer.make_ready()
    run.optimizer.zero_grad()


def broken_off(run: Run) -> None:
    """An error in the middle of a backward pass, after some of the gradients have come."""
    from rlhf_core.strategy.colossal.compat.gemini import chunks_of

    def fail(_: Tensor) -> None:
        raise RuntimeError("broken off")

    before = held_bytes()
    handle = run.model.module.model.layers[0].register_forward_hook(
        lambda *parts: parts[2].register_hook(fail) and None
    )
    with pytest.raises(RuntimeError, match="broken off"):
        run.backward(3)
    handle.remove()
    run.optimizer.zero_grad()
    assert held_bytes() <= before + 1024
    partly = [chunk.grad_chunk for chunk in chunks_of(run.model) if chunk.grad_chunk is not None]
    assert not any(chunk.can_reduce for chunk in partly)
    assert {place.state.name for chunk in partly for place in chunk.tensors_info.values()} == {"HOLD"}


def broken_off_within(run: Run) -> None:
    """An error in the backward of one operation, whose weight is in use."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    before = held_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.model.param_op_hook, "post_backward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            run.backward(3)
    run.optimizer.zero_grad()
    assert held_bytes() <= before + 1024
    state_of(run)


def never_backward(run: Run) -> None:
    for micro in run.micros(3):
        run.figures(*micro)


def evaluated(run: Run) -> None:
    run.evaluated(3)


def looked_at(run: Run) -> None:
    for micro in run.micros(3):
        run.figures(*micro)  # chunks are left gathered
        state_of(run)
        run.figures(*micro)
        run.booster.weights(run.model, ["model.norm.weight"])
    run.figures(*micro)
    with run.booster.awake(run.model):
        run.evaluated(3)
    with run.booster.exact(run.model):
        run.evaluated(3)


def no_gradients(run: Run) -> None:
    before = state_of(run)
    run.optimizer.step()
    assert equal(before, state_of(run))


ANY_TIME = (never_backward, evaluated, looked_at)
"""What may also come after the gradients, before the step."""


def undisturbed(ranks: Ranks, what: str, precision: str) -> Found:
    """What comes between two steps leaves nothing behind."""
    disturb: Callable[[Run], None] = globals()[what]
    runs = run, _ = Run(ranks, precision=precision), Run(ranks, precision=precision)
    numbers = []
    for each in runs:
        each.step(0)
        if each is run:
            disturb(each)
        loss = each.backward(1)
        if each is run and disturb in ANY_TIME:
            disturb(each)
        each.optimizer.step()
        each.optimizer.zero_grad()
        numbers.append((loss, each.optimizer.get_grad_norm(), each.evaluated(2)))
    return Found({"same": numbers[0] == numbers[1] and equal(*(state_of(each) for each in runs))})


def zero_grad_between(ranks: Ranks) -> Found:
    """Gradients may be forgotten after the forward pass, as in many a loop."""
    run, other = Run(ranks), Run(ranks)
    for each in (run, other):
        micro = next(each.micros(0))
        if each is other:
            loss, _ = each.figures(*micro)
            each.optimizer.zero_grad()
        else:
            each.optimizer.zero_grad()
            loss, _ = each.figures(*micro)
        each.booster.backward(loss, each.optimizer)
        each.optimizer.step()
    return Found({"same": equal(state_of(run), state_of(other))})


def clipped(ranks: Ranks, precision: str) -> Found:
    """First moments after one step from the same gradient, clipped and not."""
    from rlhf_core.strategy.colossal.gemini import GeminiBooster

    tensors, numbers = {}, {}
    for name, limit in (("clipped", CLIP), ("whole", None)):
        run = Run(ranks, booster=GeminiBooster(precision, limit, ranks))  # type: ignore[arg-type]
        numbers[f"{name}.norm"] = run.step(0)["0.norm"]
        tensors |= {f"{name}.{key}": tensor for key, tensor in state_of(run).items() if key.startswith("exp_avg.")}
    return Found(numbers, tensors)


def checkpointed(ranks: Ranks, kind: str) -> Found:
    """Activations computed again in the backward pass."""
    run, other = Run(ranks, kind), Run(ranks, kind)
    checkpoint_gradients(run.model)
    numbers = {"same": all(run.step(step) == other.step(step) for step in range(2))}
    return Found(numbers | {"equal": equal(state_of(run), state_of(other))})


def named(ranks: Ranks, precision: str) -> Found:
    """A head's weights, read on every rank and replaced."""
    run = Run(ranks, "critic", precision)
    before = run.evaluated(0)
    held = run.booster.weights(run.model, ["head.bias", "head.weight"])
    (ids, mask), *_ = run.micros(0)
    with torch.no_grad():
        values = run.model(ids, mask)
        run.booster.load_weights(run.model, {name: -tensor for name, tensor in held.items()})
        turned = run.model(ids, mask)
    same = torch.equal(turned, -values) and before != run.evaluated(0)
    whole = run.booster.weights(run.model)
    numbers = {"turned": same, "all": len(whole), "read": equal(run.booster.weights(run.model, list(held)), {
        name: -tensor for name, tensor in held.items()
    })}  # fmt: skip
    return Found(numbers, held)


def no_kernel_on_one_rank(ranks: Ranks) -> Found:
    from rlhf_core.kernels.building import KernelError
    from rlhf_core.strategy.colossal import gemini

    def no_kernel(*_: Any, **__: Any) -> None:
        raise KernelError("its kernel needs a C++ compiler, and there is no g++")

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(gemini, "hybrid_adam", no_kernel)
        Run(ranks)
    return Found()
