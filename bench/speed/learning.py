"""One PPO optimizer step of actor and critic through adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.speed import data
from bench.speed.measure import DEVICE, Found, Run, in_turns, seconds_of
from bench.speed.models import ARITHMETIC, DTYPE, OUR_ADAPTERS, load, with_adapters, with_peft
from bench.speed.products import Products, distinct
from flows.presets import resolve
from rlhf_core.config import PPOConfig
from rlhf_core.functional.losses import policy_loss, value_loss
from rlhf_core.models.critic import Critic
from rlhf_core.models.trunk import autocast, trunk_of
from rlhf_core.ppo.learner import PPOLearner
from rlhf_core.training.padding import pad_examples
from rlhf_core.types import Experience


def step(run: Run) -> Found:
    """Measure a step in micro-batches."""
    config = _config(run)
    learner, batch, parts = _learner(run, config)
    actor = load(run, ARITHMETIC)
    products = Products.of(actor, DTYPE)
    peer = Peer(run, config)
    tokens = distinct([begin + end for begin, end in parts])

    def floor() -> None:
        with torch.inference_mode():
            for scored in (batch.action_mask.numel(), 0):  # the actor; the critic
                products.learn(tokens, scored, learns_weights=False)

    ours, theirs, limit = in_turns(run.rounds, lambda: learner.training_step(batch), lambda: peer.step(batch), floor)
    told = {
        "rows": len(batch),
        "tokens": batch.sequences.numel(),
        "distinct": tokens,
        "micro_batch": config.micro_batch_size,
        "rank": OUR_ADAPTERS.r,
    }
    return Found(
        ours, theirs, limit, {"dtype": ARITHMETIC, **told, "limit": "products alone, those of adapters left out"}
    )


def compiled_step(run: Run) -> Found:
    """Measure the same step with compiled layers, beside ours without; the first pass, which compiles, left out."""
    config = _config(run)
    plain, batch, _ = _learner(run, config)
    compiled, _, _ = _learner(run, config.model_copy(update={"compile_layers": True}))
    compiles_s = seconds_of(lambda: compiled.training_step(batch))
    ours, theirs = in_turns(run.rounds, lambda: compiled.training_step(batch), lambda: plain.training_step(batch))
    return Found(ours, theirs, settings={"dtype": ARITHMETIC, "rows": len(batch), "first_s": round(compiles_s, 1)})


def _config(run: Run) -> PPOConfig:
    rows, micro = (4, 2) if run.tiny else (32, 16)
    sizes = {"dtype": ARITHMETIC, "lora": OUR_ADAPTERS, "train_batch_size": rows, "micro_batch_size": micro}
    return resolve("quickstart").ppo.model_copy(update=sizes)


def _learner(run: Run, config: PPOConfig) -> tuple[PPOLearner, Experience, list[tuple[list[int], list[int]]]]:
    """Return a learner, a minibatch of the quickstart's lengths, and the prompts and responses in it."""
    actor = load(run, ARITHMETIC)
    critic = Critic.from_causal_lm(actor)
    with_adapters(critic.trunk)
    learner = PPOLearner.build(with_adapters(actor), critic, config, device=DEVICE)
    parts = data.quickstart(run, config.train_batch_size)
    padded = pad_examples(parts, torch.device("cpu"))
    response = padded.action_mask.shape[1]
    prompt = padded.sequences.shape[1] - response
    made = experience(len(parts), prompt, response, vocabulary=actor.config.vocab_size).replace(**padded._asdict())
    return learner, learner.recompute(made), parts


class Peer:
    """The same step as one writes it with transformers, peft and torch: our losses, whitening and figures left out."""

    def __init__(self, run: Run, config: PPOConfig) -> None:
        self.config = config
        self.actor = with_peft(load(run, ARITHMETIC))
        self.trunk = with_peft(trunk_of(load(run, ARITHMETIC)))
        self.head = nn.Linear(self.trunk.config.hidden_size, 1, device=DEVICE)
        self._groups = [
            [each for module in modules for each in module.parameters() if each.requires_grad]
            for modules in ((self.actor,), (self.trunk, self.head))
        ]
        self._optimizers = [torch.optim.AdamW(group, lr=config.lr, fused=True) for group in self._groups]

    def step(self, batch: Experience) -> None:
        """Take one step on both."""
        tokens = batch.action_mask.sum()
        for micro in batch.split(self.config.micro_batch_size):
            self._policy_loss(micro, tokens).backward()
            self._value_loss(micro, tokens).backward()
        for group, optimizer in zip(self._groups, self._optimizers, strict=True):
            nn.utils.clip_grad_norm_(group, self.config.grad_clip)
            optimizer.step()
            optimizer.zero_grad()

    def _policy_loss(self, micro: Experience, tokens: Tensor) -> Tensor:
        width = micro.num_actions
        with autocast(DEVICE, DTYPE):
            logits = self.actor(
                input_ids=micro.sequences, attention_mask=micro.attention_mask.long(), logits_to_keep=width + 1
            ).logits[:, :-1]
        every = logits.float().log_softmax(-1)
        return policy_loss(
            logprobs=every.gather(-1, micro.sequences[:, -width:, None])[..., 0],
            old_logprobs=micro.action_log_probs,
            advantages=micro.advantages,
            mask=micro.action_mask,
            denominator=tokens,
            clip_eps=self.config.eps_clip,
        ).loss

    def _value_loss(self, micro: Experience, tokens: Tensor) -> Tensor:
        with autocast(DEVICE, DTYPE):
            hidden = self.trunk(input_ids=micro.sequences, attention_mask=micro.attention_mask.long())[0]
        assert micro.returns is not None
        return value_loss(
            values=self.head(hidden.float())[:, -micro.num_actions - 1 : -1, 0],
            old_values=micro.values,
            returns=micro.returns,
            mask=micro.action_mask,
            denominator=tokens,
            clip_eps=self.config.value_clip,
        ).loss


def experience(rows: int, prompt: int, response: int, *, vocabulary: int) -> Experience:
    """Return a minibatch of random tokens and numbers."""
    draw = torch.Generator().manual_seed(0)

    def numbers() -> Tensor:
        return torch.randn(rows, response, generator=draw)

    return Experience(
        sequences=torch.randint(10, vocabulary, (rows, prompt + response), generator=draw),
        action_log_probs=numbers(),
        values=numbers(),
        reward=numbers(),
        kl=numbers(),
        advantages=numbers(),
        attention_mask=torch.ones(rows, prompt + response, dtype=torch.bool),
        action_mask=torch.ones(rows, response, dtype=torch.bool),
        policy_version=torch.zeros(rows, dtype=torch.long),
        rollout_log_probs=numbers(),
        returns=numbers(),
    )
