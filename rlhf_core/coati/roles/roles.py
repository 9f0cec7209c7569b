"""The four roles as Ray actors: who draws, who values, who judges, and who is the reference."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import ray
from safetensors import SafetensorError
from torch import nn

from rlhf_core.coati.ppo_setup import scorer_of
from rlhf_core.coati.prompt_batches import PromptNumbers
from rlhf_core.coati.roles.base import BasePPORole, TrainablePPORole
from rlhf_core.coati.roles.composition import Array, MadeSequences, ScoreArrays, as_array
from rlhf_core.coati.roles.flags import check_can_be_written
from rlhf_core.coati.roles.models import load_policy, load_reward_model
from rlhf_core.coati.roles.prompts import encode, next_rows
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.generation import notes_suffice
from rlhf_core.models.critic import Critic
from rlhf_core.ray_tools.group import GROUPS
from rlhf_core.rewards.scoring import WeightedScorer
from rlhf_core.rollout.experience import draw, judged, read, state_values, token_logprobs
from rlhf_core.strategy.ranks import together
from rlhf_core.training.boosted import plain_model
from rlhf_core.types import Prompt


@ray.remote(num_gpus=1, concurrency_groups=GROUPS)
class RayPPOActor(TrainablePPORole):
    """Holds the policy: draws responses, says what it thinks of them, learns."""

    role: ClassVar[str] = "actor"
    _prompts: Sequence[Prompt] = ()
    _round = -1

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def set_prompts(self, texts: Sequence[str]) -> int:
        """Take the prompts of the run, all of them on every rank, and return how many had to be cut.

        Args:
            texts: in the order of their file.

        Raises:
            DataError: if one has no token.
        """
        with self._at("load"):
            found = encode(texts, self._tokenizer, max_tokens=self._settings.max_prompt_tokens)
            self._prompts = found.prompts
            return found.cut

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def sample_prompts_and_make_sequence(self, step: int, round_number: int) -> MadeSequences:
        """Draw a response to each of this rank's next prompts; all ranks do so in the same time step.

        Args:
            step: time step since the run began, from 0.
            round_number: how often the actor has learnt; with the seed it decides every token.
        """
        with self._at("generate"):
            if round_number != self._round:
                self._round = round_number
                self._numbers.begin_episode()
            prompts, samples = self._numbers.number(self._next_prompts(step))
            with self._learner.awake():
                drawn = draw(
                    self._plain,
                    prompts,
                    samples,
                    config=self._config,
                    generation=self._generation,
                    tokenizer=self._tokenizer,
                    seed=self._settings.seed,
                    episode=round_number,
                )
            batch = read(prompts, drawn, template=self._template, generation=self._generation)
            return MadeSequences.of(drawn, batch, samples, round_number)

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def calculate_action_log_probs(self, made: MadeSequences) -> Array:
        """Return the log-probability of each response token, [B A]; called by all ranks, each with its own."""
        with self._at("log-probs"):
            if notes_suffice(self._config, self._generation, self._plain):
                return made.rollout_log_probs
            temperature = self._generation.temperature
            with self._learner.awake():
                return as_array(token_logprobs(self._plain, made.batch(), temperature=temperature, config=self._config))

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def save_checkpoint(self, save_path: str, should_save_optimizer: bool) -> list[str]:
        """Write the policy, and return the paths that were written; called by all ranks, of which the first writes.

        Args:
            save_path: of a file of all weights, which any strategy loads; without a suffix, of a directory that
                transformers loads.
            should_save_optimizer: write the optimizer's state beside it.

        Raises:
            TrainingError: if this machine's disk does not take it.
        """
        with self._at("save"), _naming_place(save_path):
            place = Path(save_path)
            if place.suffix:
                self._put(place, lambda path: self._strategy.save_model(self._trained.model, path))
            else:
                self._strategy.save_pretrained(self._trained.model, save_path, self._tokenizer)
            if not should_save_optimizer:
                return [save_path]
            beside = optimizer_path(place)
            self._put(beside, lambda path: self._strategy.save_optimizer(self._trained.optimizer, path))
            return [save_path, str(beside)]

    def _put(self, place: Path, write: Any) -> None:
        """Write a file beside its place and put it there: an earlier one is never half overwritten."""
        fresh = place.with_name(f"{place.name}.new")
        write(str(fresh))
        together(self._ranks, lambda: fresh.replace(place) if self._rank == 0 else None, what="store the model")

    def _new_model(self) -> nn.Module:
        model: nn.Module = load_policy(self._settings, self._device, trained=True)
        return model

    def _learning_rate(self) -> float:
        return self._settings.lr

    def _load(self) -> None:
        if self._rank == 0:
            _check_save_path(self._settings.save_path)  # now: after the last round the policy would be lost
        super()._load()
        self._plain = plain_model(self._trained.booster, self._trained.model)
        self._numbers = PromptNumbers(1, self._ranks)

    def _next_prompts(self, step: int) -> list[Prompt]:
        count = self._settings.experience_batch_size
        first = (step * self._world_size + self._rank) * count
        rows = next_rows(first, count, rows=len(self._prompts), seed=self._settings.seed)
        return [self._prompts[row] for row in rows]


@ray.remote(num_gpus=1, concurrency_groups=GROUPS)
class RayPPOCritic(TrainablePPORole):
    """Holds the critic: says what the states are worth, learns."""

    role: ClassVar[str] = "critic"

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def calculate_value(self, *made: MadeSequences) -> Any:
        """Return, for each batch, the value of the state before each response token, [B A].

        Called by all ranks in every time step, some of which may have no batch: they gather weights together. Of one
        batch it returns the array, of several a list, as Ray counts what is returned.
        """
        with self._at("values"), self._learner.awake():
            found = [as_array(state_values(self._plain, each.batch(), config=self._config)) for each in made]
        return found[0] if len(found) == 1 else found

    def _new_model(self) -> nn.Module:
        critic: nn.Module = Critic.from_causal_lm(load_policy(self._settings, self._device, trained=True))
        return critic

    def _learning_rate(self) -> float:
        return self._settings.critic_lr

    def _load(self) -> None:
        super()._load()
        self._plain = plain_model(self._trained.booster, self._trained.model)


@ray.remote(num_gpus=1, concurrency_groups=GROUPS)
class RayPPORewardModel(BasePPORole):
    """Holds the reward model: says how good responses are."""

    role: ClassVar[str] = "reward"

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def calculate_r(self, made: MadeSequences) -> ScoreArrays:
        """Return the score of each response."""
        with self._at("scores"):
            return ScoreArrays.of(judged(self._scorer, made.batch(), device=self._device, config=self._config))

    def _load(self) -> None:
        model = load_reward_model(self._settings, self._device, self._tokenizer)
        self._scorer: WeightedScorer = scorer_of(model, scaled=True)


@ray.remote(num_gpus=1, concurrency_groups=GROUPS)
class RayPPOInitialModel(BasePPORole):
    """Holds the policy as it was: the KL penalty is measured from it."""

    role: ClassVar[str] = "initial"

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def calculate_base_action_log_probs(self, made: MadeSequences) -> Array:
        """Return the log-probability of each response token, [B A]."""
        with self._at("reference"):
            temperature = self._generation.temperature
            return as_array(token_logprobs(self._model, made.batch(), temperature=temperature, config=self._config))

    def _load(self) -> None:
        self._model = load_policy(self._settings, self._device, trained=False)


def optimizer_path(save_path: Path) -> Path:
    """Return where the optimizer's state goes: beside the policy, `name.optim.suffix`."""
    return save_path.with_name(f"{save_path.stem}.optim{save_path.suffix or '.safetensors'}")


def _check_save_path(path: str) -> None:
    """See that the policy can be written on this machine, which need not be the one where the flags were checked.

    Raises:
        ConfigError: if it cannot.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        check_can_be_written("--save_path", path, is_directory=not Path(path).suffix)
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f"{socket.gethostname()}, which writes the policy at the end, cannot do so: {error}"
        ) from error


@contextmanager
def _naming_place(path: str) -> Iterator[None]:
    """Run a block that writes the policy; what the disk refuses is told with the machine that it belongs to."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # a full disk is the one to Python, the other to safetensors
        raise TrainingError(
            f"the trained policy could not be written to {path} on {socket.gethostname()} ({error}); make room there, "
            "and start the run again"
        ) from error
