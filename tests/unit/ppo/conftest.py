"""One thread, as for every test of trainers."""

from tests.unit.training.conftest import one_thread

__all__ = ["one_thread"]
