"""A syncer spoken by hand, on a real socket: it welcomes, publishes and pulls when a test says so.

And learners of every kind that it may have to do with.
"""

import threading

import numpy as np
import pytest

from node.pair import NumpyParameters, config_of
from skerry import config as configs
from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import Tensor, encode_fragments, layout_of, split
from skerry.core.messages import FULL, Contribution, Hello, Publication, Pull, Report, Welcome
from skerry.node.algebra import FLOAT32
from skerry.node.training import ByHand
from skerry.shell.learner import LearnerShell
from skerry.wire.server import Server
from skerry.wire.transport import Inbox, Lost, Received

WAIT_S = 60.0
LAYOUT = layout_of([Tensor("w", (300,))])
KINDS = ["thread", "process", "device"]  # where a learner's node runs; the last is a thread with its state in tensors


def learner_of(kind, host, port, layout=LAYOUT):
    """A learner of one flat parameter, and that as `parameters`."""
    parameters, home = NumpyParameters(), None
    if kind == "device":
        torch = pytest.importorskip("torch")
        from skerry.adapters.device import OnDevice

        parameters = TensorParameters()
        home = OnDevice(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
    node = "process" if kind == "process" else "thread"
    shell = LearnerShell("here", layout, ByHand(parameters), host, port, None, node, home)
    shell.parameters = parameters
    return shell


class TensorParameters(NumpyParameters):
    """The same in tensors."""

    def read(self, fragment):
        return self.values[fragment.index].clone()

    def write(self, fragment, values):
        self.values[fragment.index] = values.clone()


class Hand:
    """The syncer of a run of one fragment; what `say` and `hear` are about is the last peer it heard."""

    def __init__(self, layout=LAYOUT, **limits):
        self.configure()
        (self.fragment,) = split(layout, 1)
        self.theta = np.zeros(self.fragment.size, np.float32)
        self.inbox = Inbox()
        self.server = Server("127.0.0.1", 0, None, self.inbox, self._payload_bytes, **limits)
        self.peer = 0

    def configure(self, **tables):
        self.config = config_of(**{"sync": {"num_fragments": 1}} | tables)

    def _payload_bytes(self, message):
        return payload_bytes(message.codec, self.fragment.size)

    def hear(self, kind, is_it=lambda message: True):
        """The next such message, or such an event of the wire; a peer that is lost meanwhile is a failure."""
        while True:
            event = self.inbox.get(timeout=WAIT_S)
            heard = event.message if isinstance(event, Received) else event
            assert kind is Lost or not isinstance(heard, Lost), heard
            if isinstance(heard, kind) and is_it(heard):
                self.peer = event.peer
                return heard

    def say(self, message, payload=None):
        self.server.send(self.peer, message, payload)

    def welcome(self, progress=0.0):
        self.hear(Hello)
        table = encode_fragments([self.fragment])
        self.say(Welcome("run", 1, "here", 1, 0, configs.encode(self.config), table, 0, 0, progress))

    def take_in(self):
        """Welcome a learner and hand it the first version."""
        self.welcome()
        self.hear(Report)  # what is bulk may overtake a welcome
        self.publish(0)

    def publish(self, version, settled=None):
        seq, step = (settled.seq, settled.to_step) if settled else (0, 0)
        digest = FLOAT32.digest(self.theta)
        self.say(Publication(1, 1, 0, version, FULL, "fp32", digest, seq, step, 0.0), self.theta.tobytes())

    def pulled(self):
        self.say(Pull(1, 1, 0, 0, False, 0.0))
        return self.hear(Contribution)


def at_once(function):
    """It is under way in a thread of its own; the thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def is_over(thread):
    thread.join(WAIT_S)
    return not thread.is_alive()
