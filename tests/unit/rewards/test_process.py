"""Reward functions run where they can do no harm, and end with their owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from rlhf_core.rewards.process import RewardFunctionError, RewardProcess
from rlhf_core.rewards.resolve import RewardFunction, resolve_reward_function

LIMIT_S = 1.0
GSM8K = resolve_reward_function("gsm8k_reward_fn", allowed_modules=())
RIGHT = "<think>so</think><answer>42</answer>"


def pickled(function: Callable[..., Any], name: str = "f") -> RewardFunction:
    return RewardFunction(name, cloudpickle.dumps((function, {})))


@pytest.fixture(scope="module")
def process() -> Iterator[RewardProcess]:
    made = RewardProcess(LIMIT_S)
    yield made
    made.close()


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether the process ends in time; one that is dead and not waited for has ended."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


FAILURES = {
    "raises ZeroDivisionError": (lambda *_: 1 / 0, "it raised ZeroDivisionError: division by zero"),
    "exits": (lambda *_: __import__("sys").exit(1), "it raised SystemExit"),
    "hangs in the interpreter": (lambda *_: __import__("time").sleep(60), "it took longer than 1 s"),
    "hangs below it": (lambda *_: __import__("re").match(r"(a+)+$", "a" * 60 + "b"), "it took longer than 1 s"),
    "ends its process": (lambda *_: __import__("os")._exit(3), r"it ended its process \(exit code 3\)"),
    "crashes": (lambda *_: __import__("ctypes").string_at(0), r"it ended its process \(SIGSEGV\)"),
    "takes all memory": (lambda *_: len(bytearray(1 << 36)), "it raised MemoryError"),
    "returns NaN": (lambda *_: float("nan"), "it returned nan"),
    "returns more than float32": (lambda *_: 1e39, "it returned 1e\\+39, which float32 has no room for"),
    "returns inf": (lambda *_: float("-inf"), "it returned -inf"),
    "returns None": (lambda *_: None, "it returned None, which is not a number"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_function_that_fails_is_told_of_and_the_next_call_is_answered(process: RewardProcess, what: str) -> None:
    function, reason = FAILURES[what]
    with pytest.raises(RewardFunctionError, match=reason):
        process.call(pickled(function, what), "p", "r", "a")
    assert process.call(GSM8K, "", RIGHT, "42") == 10.0


def test_a_child_that_hangs_is_replaced_and_no_longer_there(process: RewardProcess) -> None:
    process.load(GSM8K)
    before = process.pid
    assert before is not None
    with pytest.raises(RewardFunctionError):
        process.call(pickled(lambda *_: __import__("time").sleep(60), "sleeps"), "p", "r", "a")
    assert gone(before)
    process.load(GSM8K)
    assert process.pid not in {None, before}


def test_what_a_function_prints_is_no_answer_and_long_texts_pass(process: RewardProcess) -> None:
    assert process.call(
        pickled(lambda _p, r, _a: __import__("os").write(1, b'{"value": 7}\n') and len(r), "prints"),
        "p",
        "r" * 300_000,
        "",
    ) == (300_000.0)


def test_text_functions_run_without_torch(process: RewardProcess) -> None:
    process.call(GSM8K, "", RIGHT, "42")
    loaded = pickled(lambda *_: float("torch" in __import__("sys").modules), "looks")
    assert process.call(loaded, "", "", "") == 0.0


def test_a_function_that_cannot_be_imported_says_why(process: RewardProcess) -> None:
    with pytest.raises(RewardFunctionError, match="ModuleNotFoundError: No module named 'nowhere'"):
        process.load(RewardFunction("nowhere", "nowhere:function"))
    with pytest.raises(RewardFunctionError, match=r"AttributeError: .*'nothing'"):
        process.load(RewardFunction("nothing", "json:nothing"))


def test_closing_ends_the_child_and_a_later_call_starts_another() -> None:
    made = RewardProcess(LIMIT_S)
    made.load(GSM8K)
    pid = made.pid
    assert pid is not None
    made.close()
    made.close()
    assert made.pid is None
    assert gone(pid)
    assert made.call(GSM8K, "", RIGHT, "42") == 10.0
    made.close()


OWNER = """
import sys, cloudpickle
from rlhf_core.rewards.process import RewardProcess
from rlhf_core.rewards.resolve import RewardFunction
process = RewardProcess(60.0)
hang = RewardFunction("hang", cloudpickle.dumps((lambda *_: __import__("re").match(r"(a+)+$", "a" * 60 + "b"), {})))
process.load(hang)
print(process.pid, flush=True)
process.call(hang, "", "", "")
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_hangs_ends_with_an_owner_that_is_killed(end: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        time.sleep(0.3)  # the function is running, and holds the interpreter
        assert not gone(child, within_s=0.0)
        os.kill(owner.pid, end)
        assert gone(child)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
