"""A model's parameters as they were when it was attached, and whether they still are.

A loop that replaces a parameter trains another tensor than the run has, and would go on for ever without learning
anything that counts. So a boundary looks at what it touches first, and at some of the model's modules in turn, and a
model that is not what was attached is refused by name. What holds the model in another way (`torch.compile`, a wrapper,
modules without parameters that come and go) changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from skerry.adapters.shards import held
from skerry.adapters.sharing import sharing
from skerry.errors import ModelError

COMPILED = "_orig_mod"  # what torch.compile calls the module that it compiles
WRAPPED = "module."  # what these put before the names of its parameters
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that can be trained; the run works in float32

MODULES_AT_ONCE = 32  # that a boundary looks at: some ten microseconds

T = TypeVar("T")

_requires_grad = attrgetter("requires_grad")
_traits = attrgetter("dtype", "shape", "device", "requires_grad")


class Attached:
    """The trainable parameters of a model by name, as tensors to read and to change."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._named = filled(model)
        self._then = {name: _traits(parameter) for name, parameter in self._named.items()}
        self._tensors = {name: held(parameter) for name, parameter in self._named.items()}
        self._is_let_go = False
        self._turn = 0
        self._remember()

    def __getitem__(self, name: str) -> Tensor:
        """The parameter's memory, as it was when it was last looked at; of one that is sharded, what is here."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def parameter(self, name: str) -> nn.Parameter:
        return self._named[name]

    def look(self, names: Iterable[str]) -> None:
        """Refuse a model of which these parameters, or the modules whose turn it is, are not as they were attached."""
        if self._is_let_go:
            return
        self._turn = (self._turn + 1) % len(self._groups)
        if not self._groups[self._turn].is_same:
            self._look_well()
        moved: dict[str, Tensor] = {}
        for name in names:
            parameter, then = self._named[name], self._then[name]
            if (now := _traits(parameter)) != then:
                raise refusal(f"parameter {name} is {_changed(then, now)}")
            if not (tensor := held(parameter)).is_set_to(self._tensors[name]):  # a loop may give it other memory
                moved[name] = tensor
        if moved:
            self._move(moved)

    def _move(self, moved: Mapping[str, Tensor]) -> None:
        """These have other memory, which must be nobody else's."""
        same = {name: held(each) for name, each in self._named.items() if _traits(each) == self._then[name]}
        if why := sharing("parameter", same):
            raise refusal(why)
        self._tensors.update(moved)

    def let_go(self) -> str:
        """Look no more: the tensors there are stay as they were last; what has become of the model, if anything has."""
        try:
            self._look_well()
            self.look(self._named)
        except ModelError as error:
            return str(error)
        finally:
            self._is_let_go = True
        return ""

    def _remember(self) -> None:
        modules = list(self._model.modules())
        groups = [modules[at : at + MODULES_AT_ONCE] for at in range(0, len(modules), MODULES_AT_ONCE)]
        self._groups = [Group.of(group) for group in groups]
        self._turn = 0

    def _look_well(self) -> None:
        """Something is another: that may be nothing to us, like a block that was compiled, or a dropout."""
        now = named(self._model)
        there = {id(parameter) for parameter in now.values()}
        for name, parameter in self._named.items():
            if id(parameter) not in there:
                raise refusal(f"parameter {name} is {'another tensor' if name in now else 'gone'}")
        known = {id(parameter) for parameter in self._named.values()}
        for name, parameter in now.items():
            if parameter.requires_grad and id(parameter) not in known:
                raise refusal(f"parameter {name} is to be trained, which it was not,")
        self._remember()


@dataclass(frozen=True)
class Group:
    """Some modules: where they keep their parameters and modules, those there were, and those that are frozen."""

    tables: list[Any]
    members: list[nn.Parameter | nn.Module | None]
    frozen: list[nn.Parameter]

    @staticmethod
    def of(modules: Iterable[nn.Module]) -> Group:
        tables = [table for module in modules for table in (module._parameters, module._modules)]
        members = [member for table in tables for member in table.values()]
        frozen = [each for each in members if isinstance(each, nn.Parameter) and not each.requires_grad]
        return Group(tables, members, frozen)

    @property
    def is_same(self) -> bool:
        """Each is the very one that it was, and what was frozen is."""
        now = [member for table in self.tables for member in table.values()]
        is_same = len(now) == len(self.members) and all(map(is_, now, self.members))
        return is_same and not any(map(_requires_grad, self.frozen))


def refusal(what: str) -> ModelError:
    return ModelError(
        f"{what} since the model was attached, and the run does not know of it: set values in place, with copy_() or "
        "load_state_dict() without assign, or change the model first and then attach it, to another skerry.Learner"
    )


def _changed(then: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """In words, the first thing that differs."""
    was, what = next((a, b) for a, b in zip(then, now, strict=True) if a != b)
    if isinstance(was, bool):
        return "frozen"
    if isinstance(was, torch.Size):
        return f"of shape {tuple(what)} instead of {tuple(was)}"
    return f"{'on ' if isinstance(was, torch.device) else ''}{what} instead of {was}"


# ---------------------------------------------------------------------------------------------- what takes part


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names they have where nothing is compiled or wrapped, each once."""
    return by_plain_name(model, a_module(model).named_parameters())


def by_plain_name(model: nn.Module, members: Iterable[tuple[str, T]]) -> dict[str, T]:
    """What a model has, by the names where nothing is compiled or wrapped; where two would have one name, refused."""
    plain = plain_names(model)
    found: dict[str, T] = {}
    for name, member in members:
        if plain(name) in found:
            raise ValueError(
                f"two tensors of the model are called {plain(name)}, one of them {name} in full: a module that is "
                f"called {COMPILED} is taken for torch.compile's, so give it another name"
            )
        found[plain(name)] = member
    return found


def a_module(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    return model


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Makes a name in this model that of the plain one: a wrapper's own prefix goes, a submodule's name stays."""
    paths = [path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, WRAPPERS)]
    wrapped = sorted((f"{path}.{WRAPPED}" if path else WRAPPED for path in paths), key=len, reverse=True)

    def plain(name: str) -> str:
        for prefix in wrapped:  # the innermost first, so that those around it are still found
            if name.startswith(prefix):
                name = prefix.removesuffix(WRAPPED) + name.removeprefix(prefix)
        path, dot, leaf = name.rpartition(".")
        return ".".join([*(part for part in path.split(".") if part != COMPILED), leaf]) if dot else name

    return plain


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain module in compilers and wrappers around the whole of it."""
    while True:
        own = WRAPPED.removesuffix(".") if isinstance(model, WRAPPERS) else COMPILED
        inner = model._modules.get(own)
        if inner is None:
            return model
        model = inner


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take part: trainable, each once; what cannot is refused by name."""
    found = {name: parameter for name, parameter in named(model).items() if parameter.requires_grad}
    if not found:
        raise ValueError("the model has no trainable parameter: nothing to synchronise")
    for name, parameter in found.items():
        if why := _unfit(parameter):
            raise ValueError(f"parameter {name} {why}")
    return found


def filled(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those of a model that has values, each element its own; else refused by name."""
    found = trainable(model)
    for name, parameter in found.items():
        if held(parameter).is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device, without values: make some first, with to_empty()"
            )
    if why := sharing("parameter", found):
        raise ValueError(f"{why}: give tied modules the same Parameter, and others memory of their own, with clone()")
    return found


def _unfit(parameter: nn.Parameter) -> str:
    """Why no such parameter can take part, and what helps; empty if it can."""
    if is_lazy(parameter):
        return "has no shape yet: run a batch through the model first"
    if parameter.dtype not in DTYPES:
        return f"is {parameter.dtype}: keep what is trained in torch.float32, torch.bfloat16 or torch.float16"
    if parameter.layout != torch.strided:
        return f"is {parameter.layout}: keep parameters dense (torch.strided)"
    if not parameter.numel():
        return f"is empty, of shape {tuple(parameter.shape)}: leave it out, or freeze it with requires_grad_(False)"
    return ""
