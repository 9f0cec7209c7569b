"""coati's `ExperienceMakerHolder`: an experience maker as an actor that a script creates and sets to work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from transformers import PreTrainedTokenizerBase

from rlhf_core.coati.callbacks import ExperienceMakerPerformanceEvaluator, MakerCallback, tell, tell_all
from rlhf_core.coati.detached.building import MakerSettings, Models, build_maker
from rlhf_core.coati.detached.factories import set_dist_env
from rlhf_core.coati.detached.holders import find_actor, own_actor_name
from rlhf_core.coati.detached.loader_line import LoaderChunk, LoaderLine
from rlhf_core.coati.detached.registration import MakerFacts
from rlhf_core.coati.detached.weight_sender import OwnWeights, SentWeights, take_weights
from rlhf_core.coati.strategy import Strategy
from rlhf_core.config import PPOOptions
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.models.compatibility import vocabulary_size
from rlhf_core.ray_tools.calls import wait_for
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollout.experience import ExperienceMaker
from rlhf_core.rollout.worker import MakerActor
from rlhf_core.training.loaders import Batches
from rlhf_core.types import Experience, Prompt

GROUPS = {"status": 1, "experience_io": 1, "model_io": 1, "compute": 1}
"""Ray's threads: coati's three, and one to answer on. Weights are taken on that which makes, never in its midst."""
_POLL_S = 0.2


@ray.remote(concurrency_groups=GROUPS)
class ExperienceMakerHolder(MakerActor):
    """Holds the four models, and makes experience of the batches that its trainer leases to it.

    Create it with `options(name=...)`: trainers find it by its name.

    Args:
        detached_trainer_name_list: names of trainers, at least one; of several that are one group's ranks, the first
            leases to all, so every maker may name every trainer.
        strategy_fn: builds what places the models.
        model_fn: builds actor, critic, reward model and initial model, inside this process; critic and initial model
            may be None.
        env_info: as trainers take it, with a world of one: several makers are several actors.
        sync_models_from_trainers: make nothing before a trainer has sent its weights.
        buffer_cpu_offload: without effect: experience travels in host memory.
        kl_coef: weight of the KL penalty, per nat; where an adaptive coefficient starts.
        callbacks: are told of everything, in their order.
        eval_performance: measure, and log at the loop's end.
        debug: without effect here.
        update_lora_weights: the models keep their adapters apart, as a trainer with the same setting sends them;
            otherwise they are merged when the models are built.
        options: choices of the algorithm; the trainers' too.
        tokenizer: of all models; None takes the one beside the actor's weights.
        scorer: judges responses instead of the reward model.
        seed: with episode, prompt and sample it decides every token drawn; the trainers' too.
        start_timeout_s: longest wait for the trainer: to be there, and to begin its fit.
        **generate_kwargs: how responses are drawn, as `PPOTrainer` takes them.
    """

    def __init__(
        self,
        detached_trainer_name_list: Sequence[str],
        strategy_fn: Callable[[], Strategy],
        model_fn: Callable[[], Models],
        env_info: Mapping[str, str] | None = None,
        sync_models_from_trainers: bool = False,
        buffer_cpu_offload: bool = True,  # noqa: ARG002 - coati's
        kl_coef: float = 0.1,
        callbacks: Sequence[MakerCallback] = (),
        eval_performance: bool = False,
        debug: bool = False,  # noqa: ARG002 - coati's
        update_lora_weights: bool = False,
        *,
        options: PPOOptions = PPOOptions(),  # noqa: B008 - frozen
        tokenizer: PreTrainedTokenizerBase | None = None,
        scorer: Scorer | None = None,
        seed: int = 0,
        start_timeout_s: float = 600.0,
        **generate_kwargs: Any,
    ) -> None:
        super().__init__(own_actor_name(), self._make_maker)
        self._trainers = detached_trainer_name_list
        self._strategy_fn, self._model_fn, self._env_info = strategy_fn, model_fn, env_info
        self._waits_for_weights = sync_models_from_trainers
        self._settings = MakerSettings(
            options, tokenizer, scorer, seed, kl_coef, generate_kwargs, keeps_adapters=update_lora_weights
        )
        self.callbacks, self._eval_performance = tuple(callbacks), eval_performance
        self._start_timeout_s = start_timeout_s
        self._building = threading.Lock()
        self._line: LoaderLine | None = None

    def workingloop(self, dataloader_fn: Callable[[], Batches], num_epochs: int = 1, num_steps: int = 0) -> None:
        """Make experience until the trainer's fit has what it needs; return then.

        All makers of a trainer work on one line of batches, so that any number of them makes the same: each is given
        the same loader, and adds its batches to the line's length.

        Args:
            dataloader_fn: builds a loader of batches as `PPOTrainer.fit` takes them.
            num_epochs: passes over the loader.
            num_steps: batches; above 0 in place of `num_epochs`.

        Raises:
            ConfigError: if the loader is not that of the other makers, or something is set otherwise than there.
            RlhfError: if the trainer is not there, ends, or does not begin its fit in time.
        """
        self.build()
        line = self._line_of(dataloader_fn)
        facts = self._facts(line, num_epochs, num_steps)
        trainer_name, trainer = self._first_trainer()
        self._line = line
        tell(self.callbacks, "on_loop_start")
        try:
            ticket = self._asked(trainer_name, trainer.register_maker, facts, dataloader_fn)
            self._await_end(trainer_name, trainer, ticket)
        finally:
            tell_all(self.callbacks, "on_loop_end")

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def build(self) -> None:
        """Build the models, unless they are built."""
        with self._building:  # the scheduler asks for it too
            super().build()

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def load_weights(self, publication: SentWeights | OwnWeights, timeout_s: float) -> int:
        """Take what a trainer sent, all of it or nothing; return the version that is held.

        Args:
            publication: what to take; that the own weights serve is said in the same way.
            timeout_s: longest wait for it.
        """
        if isinstance(publication, OwnWeights):
            self._version = publication.version
        else:
            self._version = take_weights(self._subscriber, publication, timeout_s)
        return self._version

    def _prompts(self, unit: LoaderChunk) -> tuple[Sequence[Prompt], Sequence[int]]:
        if self._line is None:  # this process came up again in the midst of a fit
            name, trainer = self._first_trainer()
            dataloader_fn = self._asked(name, trainer.loader_of, self._name)
            if dataloader_fn is None:
                raise RlhfError(f"{self._name} has no dataloader; call its workingloop")
            self._line = self._line_of(dataloader_fn)
        prompts, samples = self._line.read(unit)
        return prompts, samples

    def _before_making(self) -> None:
        tell(self.callbacks, "on_batch_start")
        tell(self.callbacks, "on_make_experience_start")

    def _after_making(self, experience: Experience) -> None:
        tell(self.callbacks, "on_make_experience_end", experience)

    def _before_sending(self) -> None:
        tell(self.callbacks, "on_send_start")

    def _after_sending(self) -> None:
        tell(self.callbacks, "on_send_end")
        tell(self.callbacks, "on_batch_end")

    def _make_maker(self) -> ExperienceMaker:
        if not self._name:
            raise ConfigError("an ExperienceMakerHolder needs a name; create it with options(name=...)")
        if isinstance(self._trainers, str):
            raise ConfigError(f"expected a list of trainers' names, got {self._trainers!r} alone")
        if not self._trainers:
            raise ConfigError(f"{self._name} names no trainer; give detached_trainer_name_list at least one")
        if self._env_info is not None:
            set_dist_env(self._env_info)
            if self._env_info["world_size"] != "1":
                raise ConfigError(
                    f"{self._name} has an env_info with world_size {self._env_info['world_size']}, but a maker works "
                    "alone; create several holders, each with a world of one"
                )
        maker, sizes = build_maker(self._name, self._strategy_fn, self._model_fn, self._settings)
        if self._eval_performance:
            self.callbacks = (*self.callbacks, ExperienceMakerPerformanceEvaluator(*sizes))
        return maker

    def _line_of(self, dataloader_fn: Callable[[], Batches]) -> LoaderLine:
        if not callable(dataloader_fn):
            raise ConfigError(
                f"workingloop takes a function that builds the dataloader, not a {type(dataloader_fn).__name__}; give "
                "the function itself"
            )
        return LoaderLine(
            dataloader_fn,
            tokenizer=self._maker.template.tokenizer,
            samples_per_prompt=self._settings.options.samples_per_prompt,
            seed=self._settings.seed,
            vocabulary=vocabulary_size(self._maker.actor),
        )

    def _facts(self, line: LoaderLine, num_epochs: int, num_steps: int) -> MakerFacts:
        if num_steps <= 0 and line.batches is None:
            raise ConfigError(f"the dataloader of {self._name} does not say its length; give workingloop num_steps")
        steps = num_steps if num_steps > 0 else num_epochs * (line.batches or 0)
        if steps < 1:
            raise ConfigError(f"{self._name} is to make {steps} batches; give num_epochs or num_steps of at least 1")
        first, generation = line.first(), self._maker.generation
        return MakerFacts(
            name=self._name,
            batches=line.batches,
            steps=steps,
            rows=first.rows,
            digest=first.digest,
            kl_coef=self._settings.kl_coef,
            seed=self._settings.seed,
            options=self._settings.options.model_dump(),
            temperature=generation.temperature,
            max_new_tokens=generation.max_new_tokens,
            sampling=dict(self._settings.generate_kwargs),
            has_no_weights=self._waits_for_weights and self._subscriber.version is None,
        )

    def _first_trainer(self) -> tuple[str, Any]:
        """Return name and handle of the trainer that leases: every trainer that is named must agree on it."""
        said = {}
        for name in self._trainers:
            trainer = find_actor(name, self._start_timeout_s, what="the trainer")
            said[name] = self._asked(name, trainer.first_trainer)
        first = said[self._trainers[0]]
        for name, leasing in said.items():
            if leasing != first:
                raise ConfigError(
                    f"{self._trainers[0]} and {name} are not ranks of one group, so that {self._name} can work for one "
                    "of them only; give the trainers an env_info, or name one"
                )
        return first, find_actor(first, self._start_timeout_s, what="the trainer")

    def _asked(self, trainer: str, method: Any, *arguments: Any) -> Any:
        """Return what a trainer answers; one that cannot be reached is asked again."""
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            try:
                return self._answer(trainer, method.remote(*arguments))
            except ActorUnavailableError:
                if time.monotonic() >= deadline:
                    raise RlhfError(
                        f"{self._name} could not reach {trainer}, which it works for, for {self._start_timeout_s:g} s"
                    ) from None
                time.sleep(_POLL_S)

    def _answer(self, trainer: str, call: Any) -> Any:
        def late(_: Sequence[str]) -> Exception:
            return RlhfError(
                f"waited {self._start_timeout_s:g} s for {trainer} to answer {self._name}, and no answer came"
            )

        def failed(error: RayError, _: str) -> Exception | None:
            if isinstance(error, RayTaskError):
                cause: Exception = error.cause
                return cause  # its sentence, without Ray's frame around it
            if isinstance(error, ActorUnavailableError) or not isinstance(error, RayActorError):
                return None  # not dead, or not yet
            return RlhfError(f"{trainer}, which {self._name} works for, has ended: {str(error).splitlines()[0]}")

        (answer,) = wait_for({call: trainer}, self._start_timeout_s, late=late, failed=failed)
        return answer

    def _await_end(self, name: str, trainer: Any, ticket: int) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while (state := self._asked(name, trainer.maker_loop, self._name, ticket)) != "over":
            if state == "waiting" and time.monotonic() >= deadline:
                raise RlhfError(
                    f"{self._name} waited {self._start_timeout_s:g} s for {name} to begin its fit, and it did not; "
                    "call fit, and start every maker that it names"
                )
            time.sleep(_POLL_S)
