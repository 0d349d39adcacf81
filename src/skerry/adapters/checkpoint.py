"""What a PyTorch learner keeps on its own disk over a restart: everything that the run does not have.

The run has the model. A restarted process lacks its optimizers' state, the random generators' and whatever else has a
`state_dict` (a schedule, a GradScaler, a loader that knows its place): that is what the file holds. It is a safetensors
file whose metadata says how the tensors belong together, so reading it runs nothing. Tensors are copied at a step
boundary, where they are, and written by a thread, to another name that then takes the file's place: whoever is killed
at any moment finds the last one whole.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import random
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from skerry.disk import sync_folder
from skerry.errors import ConfigError, ModelError, one_line

EVERY_S = 60.0  # what a kill may cost an optimizer that remembers a thousand steps
FORMAT = 1
METADATA = "skerry checkpoint"
TENSOR, TUPLE, PAIRS = "$tensor", "$tuple", "$pairs"  # what JSON has no word for
PLAIN = (str, int, float, bool, type(None))
# What PyTorch's own optimizers keep of a parameter in its shape.
ALIKE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta")

log = logging.getLogger("skerry.learner")


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


def check_options(path: object, others: object, every_s: object) -> None:
    """What is said of a checkpoint, whether there is to be one or not."""
    if path is not None and not str(path):
        raise ConfigError("checkpoint is given and empty: name a file, or leave it out to keep none")
    if isinstance(every_s, bool) or not isinstance(every_s, int | float) or not every_s > 0:
        raise ConfigError(f"checkpoint_every_s = {every_s!r}: give seconds, more than 0")
    if not isinstance(others, list | tuple):
        raise ConfigError(f"checkpoint_with is a {type(others).__name__}: give a list of what is to be kept")
    for at, each in enumerate(others):
        if not callable(getattr(each, "state_dict", None)) or not callable(getattr(each, "load_state_dict", None)):
            raise ConfigError(
                f"checkpoint_with[{at}] is a {type(each).__name__}: give what has state_dict and load_state_dict"
            )
    if path is None and (others or every_s != EVERY_S):
        word = "checkpoint_with" if others else "checkpoint_every_s"
        raise ConfigError(f"{word} is given and checkpoint is not: name the file that all of it is kept in")


class Generators:
    """The random generators of the process: Python's, numpy's and PyTorch's, those of the devices too."""

    def state_dict(self) -> dict[str, Any]:
        kind, keys, *rest = np.random.get_state(legacy=True)
        return {
            "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(np.array(keys).astype(np.int64)), *rest),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def check(self, state: dict[str, Any]) -> None:
        """Load it into generators that nobody draws from."""
        self._load(state, random.Random().setstate, np.random.RandomState().set_state, torch.Generator().set_state)
        for number, each in enumerate(self._of_devices(state)):
            torch.Generator(f"cuda:{number}").set_state(each)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._load(state, random.setstate, np.random.set_state, torch.set_rng_state)
        if of_devices := self._of_devices(state):
            torch.cuda.set_rng_state_all(of_devices)

    def _load(self, state: dict[str, Any], *setters: Callable[[Any], object]) -> None:
        kind, keys, *rest = state["numpy"]
        numpy = (kind, keys.numpy().astype(np.uint32), *rest)
        for setter, each in zip(setters, (state["python"], numpy, state["torch"]), strict=True):
            setter(each)

    def _of_devices(self, state: dict[str, Any]) -> list[torch.Tensor]:
        """Those of another number of devices are nobody's."""
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found: list[torch.Tensor] = state["cuda"]
        return found if len(found) == devices else []


class Checkpoint:
    """One file, of these optimizers and others, written every so often; `named` are the model's parameters."""

    def __init__(
        self,
        path: str | Path,
        optimizers: Sequence[torch.optim.Optimizer],
        others: Sequence[Stateful],
        every_s: float,
        named: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.path = Path(path).resolve()  # a link stays one, and leads to the newest
        if not self.path.parent.is_dir():
            raise ConfigError(f"checkpoint {self.path}: there is no folder {self.path.parent}: make it first")
        self._optimizers, self._generators = optimizers, Generators()
        self._parts: dict[str, Sequence[Stateful]] = {
            "optimizers": optimizers, "others": others, "generators": [self._generators]
        }  # fmt: skip
        self._name_of = {id(parameter): name for name, parameter in (named or {}).items()}
        self._every_s = every_s
        self._taken_at = time.monotonic()
        self._writer: threading.Thread | None = None
        self._trouble: BaseException | None = None
        self._said: tuple[str, Any] | None = None  # of what goes wrong
        self._is_there = os.path.exists(self.path)
        self._written_at: float | None = None  # the one that is there, by this process
        self._owner = os.getpid()
        self._state()  # what cannot be kept is refused now,
        self._has_looked = False  # or once an optimizer has taken its first step, and has a state
        for left in self.path.parent.glob(f"{glob.escape(self.path.name)}.{'[0-9a-f]' * 16}.tmp"):
            shutil.rmtree(left, ignore_errors=True)  # of a process that was killed while it wrote

    def restore(self) -> bool:
        """Have everything as the file has it; whether there is one."""
        if not self.path.exists():
            return False
        told, tensors = self._read()
        try:
            if told["kinds"] != self._kinds:
                raise ValueError(f"it is of {_listed(told['kinds'])}, and {_listed(self._kinds)} are given")
            states = {part: _joined(told[part], tensors) for part in self._parts}
            self._check(told.get("parameters"), states)
            for part, members in self._parts.items():
                for member, state in zip(members, states[part], strict=True):
                    member.load_state_dict(state)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
            raise ModelError(  # a recursion is a RuntimeError
                f"checkpoint {self.path}: does not fit what it is to be loaded into ({one_line(str(error))}): give "
                "what it was made with, or remove it to begin anew"
            ) from None
        return True

    def _check(self, parameters: Any, states: dict[str, Any]) -> None:
        """Before anything is loaded: an optimizer that loads its state compares neither names nor shapes."""
        for optimizer, state in zip(self._optimizers, states["optimizers"], strict=True):
            _check_state(optimizer, state)
        if parameters is not None:  # earlier builds wrote none
            _compare(parameters, self._parameters)
        (state,) = states["generators"]
        self._generators.check(state)

    def look(self) -> None:
        """At a step boundary: take one if it is time, unless the last is still being written."""
        if not self._has_looked:
            self._has_looked = True
            self._refuse()
        is_writing = self._writer is not None and self._writer.is_alive()
        if time.monotonic() - self._taken_at >= self._every_s and not is_writing:
            self.take()

    def _refuse(self) -> None:
        """What cannot be kept, by its name; whatever else goes wrong with a state is said when it is taken."""
        try:
            self._state()
        except ConfigError:
            raise
        except Exception:
            log.debug("checkpoint %s: no state", self.path, exc_info=True)

    def take(self) -> None:
        """Copy everything, and have it written, by the process that it is of; training goes on if that cannot be."""
        if os.getpid() != self._owner:
            return
        self.wait()
        self._taken_at = time.monotonic()
        try:
            told, tensors = self._state()
            kept = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        except Exception as error:  # somebody else's state_dict, or no memory
            self._say(error)
            return
        self._writer = threading.Thread(target=self._write, args=(told, kept), name="skerry-checkpoint")
        self._writer.start()

    def wait(self, is_last: bool = False) -> None:
        """Until the last is written; what went wrong with it is said, once for as long as it does, and at the end."""
        if os.getpid() != self._owner:
            return  # the thread is not there in a fork
        if self._writer is None:
            return
        self._writer.join()
        trouble, self._writer, self._trouble = self._trouble, None, None
        self._is_there = self._is_there or trouble is None
        if trouble is not None:
            self._say(trouble, is_last)
            return
        if self._said:
            log.warning("checkpoint %s is written again", self.path)
        self._said, self._written_at = None, self._taken_at

    def _say(self, trouble: BaseException, is_last: bool = False) -> None:
        kind, number = type(trouble).__name__, getattr(trouble, "errno", "")  # its text has a name that is drawn anew
        if (kind, number) != self._said or is_last:
            why = f"{kind}: {one_line(str(trouble))}"
            then = "" if is_last else ", and it is tried again"
            log.warning("checkpoint %s could not be written (%s); %s%s", self.path, why, self._left, then)
        self._said = kind, number

    @property
    def _left(self) -> str:
        if not self._is_there:
            return "there is none"
        age = "" if self._written_at is None else f" from {time.monotonic() - self._written_at:.0f} s ago"
        return f"the one before it stays{age}"

    @property
    def _kinds(self) -> dict[str, list[str]]:
        return {part: [type(member).__name__ for member in members] for part, members in self._parts.items()}

    @property
    def _parameters(self) -> list[list[list[Any]]]:
        """Name and shape of each, by optimizer and group; what is none of the model's, like a master, has no name."""
        return [
            [
                [[self._name_of.get(id(each), ""), list(each.shape)] for each in group["params"]]
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]

    def _state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        told: dict[str, Any] = {"kinds": self._kinds, "parameters": self._parameters} | {
            part: _apart([member.state_dict() for member in members], part, tensors)
            for part, members in self._parts.items()
        }
        return told, tensors

    def _write(self, told: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """In a folder of its own first, which nobody else writes to, and which holds whatever a kill leaves."""
        folder = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}.tmp")
        try:
            folder.mkdir(mode=0o700)
            host = {name: tensors.pop(name).cpu().contiguous() for name in list(tensors)}
            save_file(host, folder / "state", {METADATA: json.dumps({"format": FORMAT, **told})})
            with (folder / "state").open("rb") as file:
                os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode & 0o755)  # whatever the umask lets others do
                os.fsync(file.fileno())
            (folder / "state").replace(self.path)
            sync_folder(self.path.parent)
        except Exception as error:
            self._trouble = error
        shutil.rmtree(folder, ignore_errors=True)

    def _read(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        try:
            if not self.path.is_file():
                raise OSError("it is no plain file")
            with safe_open(self.path, framework="pt") as file:
                told = json.loads((file.metadata() or {})[METADATA])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if not isinstance(told, dict):
                raise ValueError("its metadata is no table")
        except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
            why = one_line(str(error))
            raise ModelError(
                f"checkpoint {self.path}: is no readable checkpoint ({why}): name another, or remove it"
            ) from None
        if told.get("format") != FORMAT:
            number = one_line(str(told.get("format")))
            raise ModelError(f"checkpoint {self.path}: is of format {number}, and this version reads {FORMAT}")
        return told, tensors


def _apart(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON, with its tensors put aside under the path that leads to them."""
    if getattr(value, "placements", None) is not None:  # a DTensor
        raise ConfigError(
            f"checkpoint: {path} is sharded, which a checkpoint cannot keep: save it with torch.distributed.checkpoint"
        )
    if isinstance(value, torch.Tensor):
        if odd := _oddity(value):
            raise ConfigError(
                f"checkpoint: {path} is {odd}, which a checkpoint cannot keep: use an optimizer whose state is dense "
                "and of usual types, or leave checkpoint out and save it yourself"
            )
        name = f"{len(tensors)}.{path}"  # the number, for two paths may read alike
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        pairs = [[_apart(key, path, tensors), _apart(each, f"{path}.{key}", tensors)] for key, each in value.items()]
        return {PAIRS: pairs}
    if isinstance(value, list | tuple):
        items = [_apart(each, f"{path}.{at}", tensors) for at, each in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    raise ConfigError(
        f"checkpoint: {path} is a {type(value).__name__}, which a checkpoint cannot keep: numbers, strings, tensors, "
        "lists and dicts can be"
    )


def _oddity(tensor: torch.Tensor) -> str:
    """What about it a safetensors file has no way to say; empty if there is nothing."""
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"{tensor.layout}".removeprefix("torch.")
    return "" if _is_known(tensor.dtype) else f"{tensor.dtype}".removeprefix("torch.")


@cache
def _is_known(dtype: torch.dtype) -> bool:
    """By the library that is installed: later ones know more."""
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except Exception:  # a KeyError, or torch's own that it cannot be copied
        return False
    return True


def _joined(told: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """What `_apart` took apart."""
    if isinstance(told, list):
        return [_joined(each, tensors) for each in told]
    if not isinstance(told, dict):
        return told
    ((word, inner),) = told.items()
    if word == TENSOR:
        return tensors[inner]
    if word == TUPLE:
        return tuple(_joined(each, tensors) for each in inner)
    return {_joined(key, tensors): _joined(each, tensors) for key, each in inner}


def _compare(theirs: list[list[list[Any]]], ours: list[list[list[Any]]]) -> None:
    """The parameters of each group of each optimizer, in their order; one without a name may be any of its shape."""
    for their_groups, our_groups in zip(theirs, ours, strict=True):
        for (name, shape), (our_name, our_shape) in zip(chain(*their_groups), chain(*our_groups), strict=True):
            if shape != our_shape or (name and our_name and name != our_name):
                there, here = f"{name or 'a parameter'} of {shape}", f"{our_name or 'one'} of {our_shape}"
                raise ValueError(f"it has {there} where {here} is given")


def _check_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """By its groups, and by the tensors that have their parameter's shape."""
    theirs, ours = ([group["params"] for group in groups] for groups in (state["param_groups"], optimizer.param_groups))
    there, here = [len(group) for group in theirs], [len(group) for group in ours]
    if there != here:
        raise ValueError(f"its groups are of {there} parameters, and groups of {here} are given")
    if not type(optimizer).__module__.startswith("torch.optim."):
        return  # it may mean something else by the same words
    for their_group, our_group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        _check_settings(optimizer, their_group, our_group)
    for number, parameter in zip(chain(*theirs), chain(*ours), strict=True):
        kept = state["state"].get(number, {})
        for word in ALIKE:
            if isinstance(values := kept.get(word), torch.Tensor) and values.shape != parameter.shape:
                shapes = f"{list(values.shape)}, and parameter {number} is of {list(parameter.shape)}"
                raise ValueError(f"it has {word} of {shapes}")


def _check_settings(optimizer: torch.optim.Optimizer, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """A group's numbers, like lr and betas, are there and are numbers: nobody else looks before the first step.

    What is none may be missing: later versions of torch have more switches.
    """
    for word in optimizer.defaults.keys() & ours.keys():
        kind = _numbers(ours[word])
        if kind and _numbers(theirs.get(word)) != kind:
            there = f"{theirs[word]!r}" if word in theirs else "nothing"
            raise ValueError(f"it has {there} as the {word} of an optimizer, where {ours[word]!r} is given")


def _numbers(value: Any) -> str:
    """One number or several, in words; empty if it is something else."""
    if isinstance(value, list | tuple):
        return f"{len(value)} numbers" if all(_numbers(each) == "a number" for each in value) else ""
    if isinstance(value, torch.Tensor):
        return "a number" if value.numel() == 1 else ""
    return "a number" if isinstance(value, Real) and not isinstance(value, bool) else ""


def _listed(kinds: dict[str, list[str]]) -> str:
    return ", ".join(name for part in ("optimizers", "others") for name in kinds[part]) or "nothing"
