"""Gemini on any device, in float32 too, with exact masters, and with gradients that can be checked and forgotten.

What differs from ColossalAI's, and why:

    on a CPU             it tells a chunk's shard from what is offloaded by the device: on a CPU both are one
    float32              it takes half precisions alone, with masters in float32; without masters it can do with it
    masters              it makes them of weights that it has rounded already
    buffers              it rounds them too, the rotary frequencies among them
    what a model returns are tensors of a class of its own, whose in-place functions change nothing
    train and eval       do not reach the module inside, only those within it
    forward passes       of an automatic placement without gradients are refused until one with gradients has been made
    unused weights       end in an error of two sentences and a list, long after their pass
    time                 its log looks the caller up in all modules for a line of each pass that nobody reads: 0.14 s
    memory               a cache of functions holds every model for ever; a shard of float32 weights is held twice
    norm and clipping    its step does both in one go, too late to refuse a gradient that is not finite
    a step left out      its gradients are added to the next one's
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rlhf_core.errors import ConfigError
from rlhf_core.strategy.colossal.compat.adam import forget_powers, widen_gradients
from rlhf_core.strategy.colossal.compat.loading import upstream

_FEWEST, _MOST = 4, 32
"""Chunks of a small model: each is whole on every rank while its weights are used."""
_SMALLEST, _LARGEST = 1 << 23, 1 << 26
"""Elements of a large model's chunks: 16 to 128 MB in bfloat16, beyond which messages get no faster."""
_TRIES = 512


def padded_elements(sizes: Sequence[int], world_size: int, chunk: int) -> int:
    """Return the elements of all chunks together; a rank holds one in `world_size` of them.

    Args:
        sizes: elements of each weight, in the model's order.
        world_size: ranks.
        chunk: elements of a chunk, a multiple of `world_size`; a larger weight gets a chunk of its own size.
    """
    total = room = 0
    for size in sizes:
        if size > room:
            room = max(chunk, _divided(size, world_size))
            total += room
        room -= size
    return total


def chunk_elements(sizes: Sequence[int], world_size: int) -> int:
    """Return the elements of the chunks that waste least: up to 5 % of a toy, less than 2 % of any real model.

    A chunk as large as some neighbours together, a layer say, is filled to its end: only such sums are tried.

    Args:
        sizes: elements of each weight, in the model's order.
        world_size: ranks.
    """
    total = sum(sizes)
    least, most = min(total // _MOST, _SMALLEST), min(total // _FEWEST, _LARGEST)
    sums = {least, most}
    for start in range(len(sizes)):
        for reached in accumulate(sizes[start:]):
            if reached > most:
                break
            if reached >= least:
                sums.add(reached)
    tried = sorted({max(world_size, _divided(each, world_size)) for each in sums})
    tried = tried[:: -(-len(tried) // _TRIES)]
    return min(tried, key=lambda chunk: (padded_elements(sizes, world_size, chunk), -chunk))


def _divided(size: int, world_size: int) -> int:
    """Return the next number that all ranks have equal shards of."""
    return -(-size // world_size) * world_size


# Any: ColossalAI is untyped.
_chunk: Any = upstream("colossalai.zero.gemini.chunk.chunk")
_manager: Any = upstream("colossalai.zero.gemini.chunk.manager")
_optimizer: Any = upstream("colossalai.zero.gemini.gemini_optimizer")
_plugin: Any = upstream("colossalai.booster.plugin.gemini_plugin")
_accelerator: Any = upstream("colossalai.accelerator")
_utils: Any = upstream("colossalai.utils")
_UpstreamChunk: Any = _chunk.Chunk
_UpstreamModel: Any = upstream("colossalai.zero.gemini.gemini_ddp").GeminiDDP


class HostChunk(_UpstreamChunk):  # type: ignore[misc]
    """A chunk where there is no accelerator: its shard is in host memory, which is all there is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shard_device = torch.device("meta")  # any but the CPU, to which a shard would be offloaded

    @property
    def device_type(self) -> str:
        """Return what stands for being where the computing is done."""
        return "cuda"

    def shard_move(self, device: torch.device, force_copy: bool = False, non_blocking: bool = False) -> None:
        """Do nothing: there is no other place."""


class ShardedModel(_UpstreamModel):  # type: ignore[misc]
    """Gemini's wrapper of a model.

    Args:
        module: is changed in place: its weights become views of chunks.
        working: dtype of weights and gradients.
        config: of GeminiDDP.
    """

    def __init__(self, module: nn.Module, *, working: torch.dtype, **config: Any) -> None:
        self._working = working
        self._unrounded: Tensor | None = None
        half = torch.bfloat16 if working is torch.float32 else working
        super().__init__(module, mixed_precision=half, **config)
        # Upstream's is cached by the manager, whose chunks the cache then keeps; and a list of the chunks that could
        # go at this place in one pass is not the list of another.
        manager = self.gemini_manager
        manager._get_layout_info = type(manager)._get_layout_info.__wrapped__.__get__(manager)
        self._logger = logging.getLogger(__name__)  # which knows no `ranks`; upstream gives none here

    def _init_chunks(self, **config: Any) -> None:
        self.mixed_precision = self._working
        register = self.chunk_manager.register_tensor

        def with_exact_masters(*, tensor: Tensor, group_type: str, **options: Any) -> None:
            if group_type == "fp32_param" and self._unrounded is not None:
                tensor.data.copy_(self._unrounded)
            register(tensor=tensor, group_type=group_type, **options)

        self.chunk_manager.register_tensor = with_exact_masters
        super()._init_chunks(**config)
        del self.chunk_manager.register_tensor
        self._unrounded = None

    def _preprocess_param(self, p: nn.Parameter) -> None:
        super()._preprocess_param(p)
        self._unrounded = p.data

    def _cast_buffers(self) -> None:
        for buffer in self.module.buffers():
            buffer.data = buffer.to(current_device())

    def train(self, mode: bool = True) -> ShardedModel:
        """Switch all modules, the one inside with them, to training or evaluation."""
        self.training = mode
        self.module.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model inside returns, with tensors of torch's own class."""
        if torch.is_grad_enabled():
            outputs = super().forward(*args, **kwargs)
        else:
            args, kwargs = (_utils._cast_float(given, self.mixed_precision) for given in (args, kwargs))
            placed = list(self.gemini_manager.compute_list)
            with torch.inference_mode(mode=False), torch.no_grad():  # the shards that it makes are to be trained
                outputs = self._inference_forward(*args, **kwargs)
            if self.gemini_manager.is_warmup():
                self.gemini_manager.compute_list[:] = placed  # it is to be that of a pass with gradients
        with torch._C.DisableTorchFunctionSubclass():
            return pytree.tree_map_only(Tensor, lambda tensor: tensor.as_subclass(Tensor), outputs)

    def _post_backward(self) -> None:
        unused = [name for weight, name in self.param2name.items() if not weight._gemini_reduced]
        if unused:
            raise ConfigError(
                f"strategy gemini trains weights that every pass uses, but this one did without {len(unused)} of "
                f"{len(self.param2name)}, first {unused[0]}; remove what is not used, or take zero2"
            )
        super()._post_backward()


class ShardedOptimizer(_optimizer.GeminiOptimizer):  # type: ignore[misc]
    """Gemini's optimizer, which takes steps of gradients that others have checked.

    Args:
        optim: a HybridAdam over the weights of the model, as it was before.
        model: as Gemini wrapped it.
        config: of GeminiOptimizer.
    """

    def __init__(self, optim: torch.optim.Optimizer, model: ShardedModel, **config: Any) -> None:
        self.div_scale = 1.0
        """What the gradients of the next step are divided by."""
        # With bfloat16 it leaves losses alone and skips no step, as we want it whatever the precision.
        working, model.mixed_precision = model.mixed_precision, torch.bfloat16
        super().__init__(optim, model, **config)
        model.mixed_precision = working
        forget_powers(optim)

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of the gradients, without padding; none before the first pass."""
        chunks = chunks_of(self.module) if self.chunk_manager.accumulating_grads else ()
        return [chunk.grad_chunk.payload[: chunk.valid_end] for chunk in chunks if chunk.valid_end]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the wrapper's
        """Forget the gradients, and give back their memory."""
        super().zero_grad()
        rest(self.module)
        self.chunk_manager.accumulating_grads = False
        for chunk in chunks_of(self.module):
            if chunk.grad_chunk is not None:
                _forget(self.chunk_manager, chunk.grad_chunk)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Take a step, and forget its gradients."""
        rest(self.module)
        super().step(*args, **kwargs)
        if not self.module.master_weights:
            for group in self.param_groups:
                for shard in group["params"]:
                    shard.data = shard.new_empty(0)  # else it keeps the weights' shard while they are gathered

    def _set_grad_ptr(self) -> None:
        super()._set_grad_ptr()
        widen_gradients(self.optim)

    def _get_combined_scale(self) -> float:
        return -1.0 if self.div_scale == 1.0 else self.div_scale


class ShardedPlugin(_plugin.GeminiPlugin):  # type: ignore[misc]
    """Gemini's plugin, with these parts.

    Args:
        working: dtype of weights and gradients; float32 has no masters.
        placement: static, or auto: by the GPU memory that is free.
    """

    def __init__(self, *, working: torch.dtype, placement: str) -> None:
        super().__init__(
            placement_policy=placement,
            precision="bf16",
            master_weights=working is not torch.float32,
            enable_gradient_accumulation=True,
            # A stream of its own for it frees weights that the other stream may still be reading.
            enable_async_reduce=False,
        )
        self.gemini_config |= {"working": working}
        del self.gemini_config["mixed_precision"]
        if not torch.cuda.is_available():
            _chunk.Chunk = _manager.Chunk = HostChunk

    def configure(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Any = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[nn.Module, Any, Any, Any, Any]:
        """Wrap model and optimizer."""
        info = _plugin.get_param_info(optimizer)
        size = chunk_elements([weight.numel() for weight in model.parameters()], self.zero_size)
        chunks = {self.zero_size: {"chunk_size": size, "keep_gathered": False}}
        config = self.gemini_config | {"chunk_config_dict": chunks, "zero_group": self.zero_group}
        boosted = ShardedModel(model, **config)
        wrapped = None if optimizer is None else ShardedOptimizer(optimizer, boosted, params_info=info)
        return boosted, wrapped, criterion, dataloader, lr_scheduler


def current_device() -> torch.device:
    """Return the device of passes."""
    device: torch.device = _accelerator.get_accelerator().get_current_device()
    return device


def chunks_of(model: ShardedModel) -> Sequence[Any]:
    """Return the chunks of the working weights, in the model's order."""
    found: Sequence[Any] = model.chunk_manager.get_chunks(model.fp16_params)
    return found


def rest(model: ShardedModel) -> None:
    """Let each rank have its shards of the weights alone, whatever pass was made or broken off."""
    manager = model.chunk_manager
    for chunk in chunks_of(model):
        _hold(chunk)
        manager.release_chunk(chunk)
        manager.move_chunk(chunk, model.grads_device[chunk.get_tensors()[0]])  # home, where it is offloaded
    model.gemini_manager.reset_attributes()


def _hold(chunk: Any) -> None:
    """Take a chunk's tensors back from the operation or the reduction that they were left in."""
    for tensor in chunk.get_tensors():
        chunk.tensor_trans_state(tensor, _chunk.TensorState.HOLD)


def _forget(manager: Any, chunk: Any) -> None:
    """Give back the memory of a chunk of gradients; the next pass takes it again."""
    _hold(chunk)
    for kind, used in chunk.memory_usage.items():
        manager.total_mem[kind] -= used
    if chunk in manager.accessed_chunks:
        manager.accessed_chunks.remove(chunk)
        manager.accessed_mem -= chunk.chunk_mem
    _chunk.free_storage(chunk.cuda_global_chunk)
    chunk.cuda_shard = chunk.cpu_shard = None
    chunk.is_gathered = False
