"""Settings for every test: property tests draw the same examples each time and are not timed."""

import signal
import sys

import pytest
from hypothesis import settings

settings.register_profile("skerry", deadline=None, derandomize=True)
settings.load_profile("skerry")


SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@pytest.fixture(autouse=True)
def signals_as_in_a_new_process():
    """A command that a test calls in this process listens to them, and some end it at once when they come twice."""
    for number, handler in SIGNALS.items():
        signal.signal(number, handler)
    yield
    for number, handler in SIGNALS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def one_torch_thread():
    """Sums in one order, so that losses compare to the bit; does not import torch for tests that do not."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
