"""The tiny data set, network and graphs of the other tests."""

from tests.tasks.conftest import threads_as_before, workshop

__all__ = ["threads_as_before", "workshop"]
