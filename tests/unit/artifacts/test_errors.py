"""Errors cross processes: a Ray actor's reaches its driver only if it can be pickled."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil

import infra
from infra.artifacts.s3_requests import RefusedError
from infra.errors import InfraError


def every_error() -> list[type[InfraError]]:
    """Return InfraError and all that derive from it anywhere in infra."""
    for module in pkgutil.walk_packages(infra.__path__, "infra."):
        importlib.import_module(module.name)
    found = [InfraError]
    for error in found:
        found += [each for each in error.__subclasses__() if each.__module__.startswith("infra.")]
    return found


def test_refusals_of_a_server_are_among_them() -> None:
    assert RefusedError in every_error()


def test_every_error_survives_the_way_to_another_process() -> None:
    for error_class in every_error():
        own = "__init__" in vars(error_class)
        words = [f"word {name}" for name in list(inspect.signature(error_class).parameters)] if own else ["a sentence"]
        error = error_class(*words)
        arrived = pickle.loads(pickle.dumps(error))
        assert type(arrived) is error_class
        assert (str(arrived), vars(arrived)) == (str(error), vars(error))


def test_a_refusal_keeps_its_sentence_and_its_code() -> None:
    arrived = pickle.loads(pickle.dumps(RefusedError("the server refused", "AccessDenied")))
    assert (str(arrived), arrived.code) == ("the server refused", "AccessDenied")
