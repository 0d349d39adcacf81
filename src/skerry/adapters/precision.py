"""Parameters in bfloat16 and float16: the run's float32 is kept whole beside what their dtype can hold.

An optimizer may keep a float32 *master* of such a parameter, and train that. Then the master is what the run reads and
changes, and the parameter is rounded from it. Where there is none, the *rest* is kept here: what the parameter's dtype
cannot hold of its value, as a float32 tensor beside it. A merged update is often smaller than half of the parameter's
last place; without the rest each of them would be rounded away, and would come back as a drift that nobody trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from skerry.adapters.attached import Attached
from skerry.adapters.shards import held
from skerry.errors import ConfigError, ModelError

Masters = Mapping[nn.Parameter, Tensor] | Callable[[nn.Parameter], Tensor | None] | None
"""A float32 tensor of a parameter: by a table, or by who knows; None where a parameter has none, or not yet."""


def asked(masters: Masters) -> Callable[[nn.Parameter], Tensor | None]:
    if masters is not None and not callable(masters) and not isinstance(masters, Mapping):
        raise ConfigError(
            f"masters is a {type(masters).__name__}: give a table from each parameter to its float32 copy, or a "
            "function of the parameter"
        )
    return masters if callable(masters) else (masters or {}).get


def check_masters(masters: Masters, parameters: Iterable[nn.Parameter]) -> None:
    """A table speaks of parameters of the model, each by itself: what it says of anything else nobody would read."""
    known = {id(parameter) for parameter in parameters}
    for key in masters if isinstance(masters, Mapping) else ():
        if id(key) not in known:
            what = repr(key) if isinstance(key, str) else f"a {type(key).__name__}"
            raise ConfigError(
                f"masters speaks of {what}, which is no parameter of the model: give a table from each parameter "
                "itself to its float32 copy"
            )


class Precision:
    """The float32 of every attached parameter, wherever it is."""

    def __init__(self, attached: Attached, masters: Masters = None) -> None:
        self._attached = attached
        self._ask = asked(masters)
        self.low = [name for name in attached if attached[name].dtype != torch.float32]
        self._rests: dict[str, Tensor] = {}
        self.has_low = bool(self.low)
        for name in self.low:
            self.master(name)  # one that cannot be is refused at once

    def full(self, name: str) -> Tensor | None:
        """A float32 tensor that is the parameter, or its master; None where there is neither."""
        tensor = self._attached[name]
        return tensor if tensor.dtype == torch.float32 else self.master(name)

    def master(self, name: str) -> Tensor | None:
        """Of a parameter in another dtype; it may come when the optimizer first steps, and then gets the rest."""
        asked_for = self._ask(self._attached.parameter(name))
        if asked_for is None:
            return None
        master, here = held(asked_for), self._attached[name]
        if master.dtype != torch.float32 or master.shape != here.shape or master.device != here.device:
            raise ModelError(
                f"the master of parameter {name} is {master.dtype} of shape {tuple(master.shape)} on {master.device}: "
                f"it has to be torch.float32 of shape {tuple(here.shape)} on {here.device}"
            )
        if name in self._rests:
            master.add_(self._rests.pop(name))
        return master

    def rest(self, name: str) -> Tensor:
        """What the parameter cannot hold of its value."""
        if name not in self._rests:
            self._rests[name] = torch.zeros_like(self._attached[name], dtype=torch.float32)
        return self._rests[name]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While the optimizer forgets its state: a master that goes with it leaves its rest here."""
        masters = {name: master for name in self.low if (master := self.master(name)) is not None}
        yield
        for name, master in masters.items():
            if self.master(name) is None:
                self._rests[name] = master - self._attached[name]
