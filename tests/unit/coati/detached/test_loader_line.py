"""The makers' line of batches: the same whoever reads it, from wherever, numbered as one process would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from rlhf_core.coati.detached.loader_line import LoaderChunk, LoaderLine
from rlhf_core.errors import DataError
from tests.unit.coati.ppo_trainers import TOKENIZER, encoded, padded, prompts


def line(loader: Any, **changes: Any) -> LoaderLine:
    parameters: dict[str, Any] = {"tokenizer": TOKENIZER, "samples_per_prompt": 1, "seed": 3}
    return LoaderLine(loader, **(parameters | changes))


def batches(*texts: list[str]) -> list[dict[str, Any]]:
    return [padded(encoded(each)) for each in texts]


def chunk(episode: int, index: int, position: int, rows: int = 2) -> LoaderChunk:
    return LoaderChunk(episode, index, position, rows)


def read(one: LoaderLine, unit: LoaderChunk) -> list[tuple[str, int]]:
    found = one.read(unit)
    return [(prompt.text, number) for prompt, number in zip(*found, strict=True)]


def test_a_prompt_that_comes_again_in_an_episode_is_numbered_on_whoever_makes_it() -> None:
    def loader() -> list[dict[str, Any]]:
        return batches(["a", "b"], ["a", "c"], ["a", "a"])

    straight = line(loader, samples_per_prompt=2)
    assert read(straight, chunk(0, 0, 0, 4)) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert read(straight, chunk(0, 1, 1, 4)) == [("a", 2), ("a", 3), ("c", 0), ("c", 1)]
    last = [("a", 4), ("a", 5), ("a", 6), ("a", 7)]
    assert read(straight, chunk(0, 2, 2, 4)) == last
    assert read(line(loader, samples_per_prompt=2), chunk(0, 2, 2, 4)) == last  # a maker that made none before
    # Another episode begins its numbers anew, and behind the loader's last batch comes its first.
    assert read(straight, chunk(1, 0, 3, 4)) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert read(straight, chunk(0, 1, 1, 4)) == [("a", 2), ("a", 3), ("c", 0), ("c", 1)]  # a dead maker's


def test_a_loader_that_shuffles_gives_every_maker_one_order_however_it_is_read() -> None:
    def texts_at(one: LoaderLine, position: int) -> list[str]:
        return [text for text, _ in read(one, chunk(position, 0, position))]

    first, second = (line(lambda: prompts(6, batch_size=2)) for _ in range(2))
    straight = [texts_at(first, position) for position in range(9)]
    assert [texts_at(second, position) for position in (7, 2, 8)] == [straight[7], straight[2], straight[8]]
    passes = [sorted(text for batch in straight[start : start + 3] for text in batch) for start in (0, 3, 6)]
    assert passes[0] == passes[1] == passes[2]  # every prompt in each
    assert straight[:3] != straight[3:6]
    other = line(lambda: prompts(6, batch_size=2), seed=4)
    assert [texts_at(other, position) for position in range(9)] != straight


def test_an_early_batch_is_read_again_when_it_is_no_longer_in_memory() -> None:
    begun: list[int] = []

    def loader() -> DataLoader[Any]:
        begun.append(1)
        return prompts(6, batch_size=2)

    one = line(loader)
    expected = read(one, chunk(0, 0, 1))
    read(one, chunk(1, 0, 200))
    assert read(one, chunk(0, 0, 1)) == expected
    assert len(begun) == 2


def test_the_first_batch_tells_loaders_apart() -> None:
    first = line(lambda: batches(["a", "b"], ["c", "d"])).first()
    assert first.rows == 2
    assert first == line(lambda: batches(["a", "b"], ["e", "f"])).first()
    assert first.digest != line(lambda: batches(["a", "c"])).first().digest
    assert line(lambda: batches(["a", "b"]), samples_per_prompt=3).first().rows == 6


def test_the_length_is_the_loaders_if_it_has_one() -> None:
    def endless() -> Iterator[dict[str, Any]]:
        while True:
            yield batches(["a", "b"])[0]

    assert line(lambda: batches(["a"], ["b"])).batches == 2
    assert line(endless).batches is None


def test_a_smaller_last_batch_is_refused() -> None:
    with pytest.raises(DataError, match=r"batch 1 of the makers' dataloader gives 1 sample, but the first gives 2"):
        read(line(lambda: batches(["a", "b"], ["c"])), chunk(0, 1, 1))


def test_after_a_loaders_error_the_line_is_read_anew() -> None:
    troubles = [ConnectionError("the data server hung up")]

    class Failing:
        def __init__(self) -> None:
            self._batches = batches(["a", "b"], ["a", "c"], ["a", "a"])

        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(self._batches):
                if number == 1 and troubles:
                    raise troubles.pop()
                yield batch

    one = line(Failing)
    assert read(one, chunk(0, 0, 0)) == [("a", 0), ("b", 0)]
    with pytest.raises(ConnectionError):
        one.read(chunk(0, 1, 1))
    assert read(one, chunk(0, 1, 1)) == [("a", 1), ("c", 0)]
    assert read(one, chunk(0, 2, 2)) == [("a", 2), ("a", 3)]
