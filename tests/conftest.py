"""Settings for every test: property tests draw the same examples each time and are not timed."""

import sys

import pytest
from hypothesis import settings

settings.register_profile("skerry", deadline=None, derandomize=True)
settings.load_profile("skerry")


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Sums in one order, so that losses compare to the bit; does not import torch for tests that do not."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
