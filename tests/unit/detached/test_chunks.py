from __future__ import annotations

from collections import Counter

from rlhf_core.config import PPOConfig
from rlhf_core.data import Problem
from rlhf_core.detached.rollouts import episode_problems, make_chunks

PROBLEMS = [Problem(prompt=f"prompt {index}", answer=str(index)) for index in range(10)]


def config(prompts: int, samples: int, chunk: int) -> PPOConfig:
    total = prompts * samples
    return PPOConfig(
        prompts_per_episode=prompts,
        samples_per_prompt=samples,
        chunk_size=chunk,
        train_batch_size=total,
        micro_batch_size=total,
    )


def test_every_prompt_comes_once_before_any_comes_twice() -> None:
    drawn = [
        problem.prompt
        for episode in range(5)
        for problem in episode_problems(PROBLEMS, config(4, 1, 4), seed=0, episode=episode)
    ]
    assert set(Counter(drawn[:10]).values()) == {1}
    assert set(Counter(drawn).values()) == {2}


def test_an_episode_of_more_prompts_than_there_are_takes_whole_passes() -> None:
    drawn = episode_problems(PROBLEMS, config(25, 1, 5), seed=0, episode=0)
    assert sorted(Counter(problem.prompt for problem in drawn).values()) == [2] * 5 + [3] * 5


def test_a_prompt_that_comes_twice_in_an_episode_is_drawn_with_other_noise() -> None:
    settings = config(20, 2, 40)
    problems = episode_problems(PROBLEMS, settings, seed=0, episode=0)
    [chunk] = make_chunks(problems, settings, episode=0)
    drawn = Counter((problem.key, sample) for problem, sample in zip(chunk.problems, chunk.samples, strict=True))
    assert set(drawn.values()) == {1}
    assert set(chunk.samples) == {0, 1, 2, 3}


def test_an_episodes_prompts_depend_on_seed_and_episode_alone() -> None:
    first = episode_problems(PROBLEMS, config(4, 1, 4), seed=1, episode=3)
    assert first == episode_problems(PROBLEMS, config(4, 1, 4), seed=1, episode=3)
    assert first != episode_problems(PROBLEMS, config(4, 1, 4), seed=2, episode=3)


def test_samples_of_a_prompt_stay_in_one_chunk_and_are_numbered() -> None:
    settings = config(4, 2, 4)
    problems = episode_problems(PROBLEMS, settings, seed=0, episode=0)
    chunks = make_chunks(problems, settings, episode=0)
    assert [chunk.index for chunk in chunks] == [0, 1]
    assert [chunk.samples for chunk in chunks] == [(0, 1, 0, 1)] * 2
    flat = [problem for chunk in chunks for problem in chunk.problems]
    assert flat == [problem for problem in problems for _ in range(2)]
