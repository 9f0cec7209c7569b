"""coati's interface `Strategy`, which its detached classes ask for: it makes a booster for each model, and calls it.

Upstream has removed it. A whole model leaves it in the form that its own library loads, or shard by shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from rlhf_core.config.strategy import StrategyName
from rlhf_core.data.loaders import StatefulDistributedSampler
from rlhf_core.errors import ConfigError, ModelError
from rlhf_core.models.adapters import save_adapters
from rlhf_core.models.loading import default_device
from rlhf_core.models.lora import save_merged
from rlhf_core.strategy.booster import OwnBooster
from rlhf_core.strategy.factory import check_optimizer, check_strategy, make_booster
from rlhf_core.strategy.parts import WHOLE, Parts
from rlhf_core.strategy.plain import PlainBooster
from rlhf_core.strategy.ranks import join, together

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.strategy.booster import Precision

_MB = 1024 * 1024


def write_pretrained(
    model: nn.Module, directory: Path, tokenizer: PreTrainedTokenizerBase | None = None, *, merge_adapters: bool = True
) -> None:
    """Write a directory that the model's own `from_pretrained` loads; or adapters alone, in peft's format.

    Raises:
        ModelError: if the model has no such form.
    """
    save: Any = getattr(model, "save_pretrained", None)
    is_transformers = isinstance(model, PreTrainedModel)
    if save is None or not (merge_adapters or is_transformers):
        raise ModelError(
            f"a {type(model).__name__} is not written {'' if merge_adapters else 'with its adapters apart '}by "
            "save_pretrained; use save_model, which writes all weights under their own names"
        )
    if is_transformers:
        save = partial(save_merged if merge_adapters else save_adapters, model)
    save(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def in_shards(model: nn.Module, *, trained_only: bool, shard_mb: float | None) -> Iterator[dict[str, Tensor]]:
    """Yield copies of a model's tensors in host memory, by name; tied weights once.

    Args:
        model: on this rank, whole.
        trained_only: leave out what needs no gradient.
        shard_mb: a shard is yielded once it has so many megabytes; None yields all in one.
    """
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in _tensors(model, trained_only):
        shard[name] = tensor.detach().to("cpu", copy=True)
        size += shard[name].nbytes
        if shard_mb is not None and size >= shard_mb * _MB:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _tensors(model: nn.Module, trained_only: bool) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trained_only:
            yield name, parameter
    lasting = {} if trained_only else model.state_dict()
    for name, buffer in model.named_buffers():
        if name in lasting:
            yield name, buffer


def make_strategy(
    name: StrategyName,
    *,
    precision: Precision = "fp32",
    max_norm: float | None = 1.0,
    seed: int = 42,
    device: torch.device | str | None = None,
    timeout_s: float = 600.0,
    parts: Parts = WHOLE,
) -> Strategy:
    """Return coati's interface over one of the strategies, and join the ranks that torchrun, or Ray, started.

    Args:
        name: of the strategy.
        precision: of forward passes; under ZeRO and Gemini of the working weights too.
        max_norm: gradients are clipped to this norm over all weights and ranks; None never clips.
        seed: of what is drawn: new models' weights, the order of rows.
        device: where models go; None takes the GPU where there is one.
        timeout_s: longest wait in any collective.
        parts: into which strategy 3d cuts a model.

    Raises:
        ConfigError: if the strategy cannot be had here.
    """
    where = default_device() if device is None else torch.device(device)
    check_strategy(name, precision=precision, cuda=where.type == "cuda", parts=parts)
    new_booster = partial(make_booster, name, precision=precision, max_norm=max_norm, device=where)
    return Strategy(name, new_booster, seed=seed, device=where, timeout_s=timeout_s, parts=parts)


class Strategy:
    """How models are trained: makes a booster for each, remembers it, and calls it.

    Every method is called by all ranks, in the same order.

    Args:
        name: of the strategy; says which optimizers it takes.
        new_booster: makes one, for one model.
        seed: of what is drawn.
        device: where models go that are not trained.
        timeout_s: longest wait in any collective.
        parts: into which a model is cut, one for each of the processes that hold it together.
    """

    def __init__(
        self,
        name: StrategyName,
        new_booster: Callable[..., OwnBooster],
        *,
        seed: int = 42,
        device: torch.device | str = "cpu",
        timeout_s: float = 600.0,
        parts: Parts = WHOLE,
    ) -> None:
        self.name = name
        self.seed = seed
        self.device = torch.device(device)
        self._new_booster = new_booster
        self._timeout_s, self._parts = timeout_s, parts
        self._boosters: WeakKeyDictionary[object, OwnBooster] = WeakKeyDictionary()
        """By model and by optimizer, as `prepare` returned them, or by optimizer, as `new_optimizer` did."""
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Join the ranks of this process's environment; a process joins once, however often this is called."""
        self.ranks = join(self._timeout_s).laid_out(self._parts)

    def new_booster(self) -> OwnBooster:
        """Return a booster for one model."""
        return self._new_booster(ranks=self.ranks)

    @contextmanager
    def model_init_context(self) -> Iterator[None]:
        """Run the block with random numbers that the seed decides: new models are the same on every rank."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=devices):  # left alone it forks, and warns of, every GPU of the machine
            torch.manual_seed(self.seed)
            yield

    def new_optimizer(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> torch.optim.Optimizer:
        """Return the Adam, with decoupled weight decay, that this strategy takes: to be prepared with its model.

        Args:
            parameters: of one model, or groups of them, as torch's optimizers take them; frozen ones are left out.
            lr: peak learning rate of groups that name none.
            weight_decay: of groups that name none; per step, times the learning rate.
            betas: of the two moments.
        """
        given = list(parameters)
        are_groups = bool(given) and isinstance(given[0], Mapping)
        groups: list[Any] = given if are_groups else [{"params": given}]
        groups = [{"lr": lr, "weight_decay": weight_decay, **group} for group in groups]
        for group in groups:
            group["params"] = [member for member in group["params"] if member.requires_grad]
        booster = self.new_booster()
        optimizer = booster.new_optimizer(groups, betas=betas)
        self._boosters[optimizer] = booster
        return optimizer

    def prepare(self, *models_or_pairs: Any) -> Any:
        """Return each as training needs it: (model, optimizer), a mapping of `boost`'s arguments, or a model alone.

            (actor, actor_optim), (critic, critic_optim), initial_model = strategy.prepare(
                (actor, actor_optim), (critic, critic_optim), initial_model
            )

        Of one, it returns that; of several, a list. A model without an optimizer is not trained: it goes to the
        device, whole, with the first rank's weights.

        Raises:
            ConfigError: if one is nothing of these, or the strategy does not take its optimizer.
        """
        prepared = [self._prepared(one) for one in models_or_pairs]
        return prepared[0] if len(prepared) == 1 else prepared

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Any) -> None:  # noqa: ARG002 - coati's
        """Add the loss's gradients to the model's."""
        self.booster_of(optimizer).backward(loss, optimizer)

    def optimizer_step(self, optimizer: Any) -> None:
        """Take one step, the same on every rank, from gradients averaged over ranks, checked and clipped.

        Raises:
            GradientError: if the gradient's norm is not finite; no weight was changed.
        """
        self.booster_of(optimizer)
        optimizer.step()

    def setup_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
        collate_fn: Callable[..., Any] | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return batches of this rank's rows; every rank has as many of them.

        Args:
            dataset: rows of all ranks.
            batch_size: of one rank.
            shuffle: permute the rows, differently in each epoch (`loader.sampler.set_epoch`).
            drop_last: leave out a last batch that is not full.
            collate_fn: makes a batch.
            seed: of the order; None takes the strategy's.
            options: further ones of torch's `DataLoader`.
        """
        sampler = self.setup_sampler(dataset, shuffle=shuffle, seed=seed)
        return DataLoader(
            dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, collate_fn=collate_fn, **options
        )

    def setup_sampler(
        self, dataset: Any, *, shuffle: bool = True, seed: int | None = None
    ) -> StatefulDistributedSampler:
        """Return the sampler that gives each rank rows of its own, equally many."""
        seed = self.seed if seed is None else seed
        return StatefulDistributedSampler(dataset, self.ranks.world_size, self.ranks.rank, shuffle, seed)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model of transformers or of ours inside; under Gemini its weights are elsewhere."""
        return self.booster_of(model).plain(model)

    def save_model(self, model: nn.Module, path: str, shard: bool = False) -> None:
        """Write the model's exact weights, which any strategy loads: one file, or with `shard` a directory."""
        self.booster_of(model).save_model(model, path, shard=shard)

    def load_model(self, model: nn.Module, path: str, strict: bool = True) -> None:
        """Put back what `save_model` wrote, under whichever strategy; a ModelError if it does not fit."""
        self.booster_of(model).load_model(model, path, strict)

    def save_optimizer(self, optimizer: Any, path: str, shard: bool = False) -> None:
        """Write the optimizer's state: one file, or with `shard` one in a directory."""
        self.booster_of(optimizer).save_optimizer(optimizer, path, shard=shard)

    def load_optimizer(self, optimizer: Any, path: str) -> None:
        """Put back what `save_optimizer` wrote, under whichever strategy; a ModelError if it does not fit."""
        self.booster_of(optimizer).load_optimizer(optimizer, path)

    def save_pretrained(
        self,
        model: nn.Module,
        path: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        merge_adapters: bool = True,
    ) -> None:
        """Write a directory that the model's own `from_pretrained` loads.

        Args:
            model: as `prepare` returned it.
            path: of the directory.
            tokenizer: goes into it too.
            merge_adapters: add adapters to the weights below them; else they alone are written, in peft's format.

        Raises:
            ModelError: if the model has no such form.
        """
        with self.booster_of(model).exact(model) as whole:

            def write() -> None:
                if whole is not None:
                    write_pretrained(whole, Path(path), tokenizer, merge_adapters=merge_adapters)

            together(self.ranks, write, what="write the model")

    def get_model_state_dict_shard(
        self, model: nn.Module, *, requires_grad_only: bool = False, shard_size: float | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield copies of the exact weights, whole, by the plain model's names, on the first rank; none on the others.

        Every rank goes through it to its end. Tied weights come once.

        Args:
            model: as `prepare` returned it.
            requires_grad_only: what is trained, in place of everything.
            shard_size: a shard is yielded once it has so many megabytes; None yields all in one.
        """
        with self.booster_of(model).exact(model) as whole:
            if whole is not None:
                yield from in_shards(whole, trained_only=requires_grad_only, shard_mb=shard_size)

    def booster_of(self, prepared: object) -> OwnBooster:
        """Return the booster of a model or optimizer that `prepare` returned: what `PPOTrainer` is built with.

        Raises:
            ConfigError: if this strategy has not prepared it.
        """
        booster = self._boosters.get(prepared)
        if booster is None:
            raise ConfigError(
                f"this {type(prepared).__name__} was not prepared by this strategy; give what its prepare returned"
            )
        return booster

    def _prepared(self, one: Any) -> Any:
        match one:
            case nn.Module():
                return self._boosted(model=one)["model"]
            case (nn.Module() as model, optimizer):
                boosted = self._boosted(model=model, optimizer=optimizer)
                return boosted["model"], boosted["optimizer"]
            case {"model": nn.Module()}:
                return {name: value for name, value in self._boosted(**one).items() if value is not None}
        raise ConfigError(
            f"expected a model, a pair of model and optimizer, or a mapping with 'model', got {type(one).__name__}; "
            "give prepare one of these"
        )

    def _boosted(self, *, model: nn.Module, optimizer: Any = None, **others: Any) -> dict[str, Any]:
        booster: OwnBooster
        if optimizer is None:
            booster = PlainBooster(ranks=self.ranks)
        else:
            check_optimizer(self.name, optimizer, model)
            booster = self._boosters.get(optimizer) or self.new_booster()
        if optimizer is None or self.name == "plain":
            model.to(self.device)  # ColossalAI's plugins place it by themselves
        found = booster.boost(model, optimizer, **others)
        names = ("model", "optimizer", "criterion", "dataloader", "lr_scheduler")
        boosted = dict(zip(names, found, strict=True))
        for name in ("model", "optimizer"):
            if boosted[name] is not None:
                self._boosters[boosted[name]] = booster
        return boosted
