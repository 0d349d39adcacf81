"""What the nodes compute with in the laboratory: flat float32 torch tensors on one device.

Rules that hold here: what is encoded and published has the bits that algo gives; a merge is algo's up to the order of
its sums. Nothing waits for the device, so that the host runs ahead of it: no value is looked at. A payload is never
packed: it carries the values it says, and its length is what they would weigh on the wire. Tensors are shared between
learners and syncer, and none is ever changed in place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from skerry.algo import codecs, kernels
from skerry.algo.codecs import Inspection
from skerry.algo.fragments import BLOCK, Fragment
from skerry.algo.merge import DIRECTION_MIN, NORM_MIN, Held
from skerry.algo.outer import is_multiple
from skerry.core.facts import Decision
from skerry.node.algebra import Adopted, Merged, Step, Values

LEVELS = {"int8": 127.0, "int4": 7.0}
FOUR = [float(kernels.MIDDLE), float(kernels.LOW), float(kernels.HIGH)]
THREE = [float(kernels.MIDDLE_OF_3), 0.0, float(kernels.HIGH_OF_3)]
BELOW_SCALE_MIN = float(kernels.SCALE_MIN) * (1 - 2.0**-23)  # the next smaller float32


@dataclass(frozen=True, eq=False, slots=True)
class Payload:
    """The values a payload says; of a publication, the new base itself."""

    values: Tensor
    bytes: int

    def __len__(self) -> int:
        return self.bytes


class Blocks(NamedTuple):
    """How a merge sees a fragment: the group of each block, and which groups RDA averages."""

    group: list[int]
    averaged: list[bool]


@dataclass(frozen=True, eq=False, slots=True)
class _Map:
    """The same on the device."""

    group: Tensor  # of each block
    members: Tensor  # (groups, blocks), one where the block is the group's
    averaged: Tensor


class Device:
    """An `Algebra` whose arrays are torch tensors."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._serials = itertools.count()
        self._genesis: dict[bytes, Values] = {}
        self._has_begun = False
        self._maps: dict[Fragment, _Map] = {}
        self._deltas: dict[int, Tensor] = {}  # the last merged one by fragment
        self._cosines: list[Tensor] = []
        # CUDA divides by a number on the host as if by its inverse, which is off by a bit
        self._levels = {codec: torch.tensor(top, device=self.device) for codec, top in LEVELS.items()}
        self._four, self._three = (torch.tensor(levels, device=self.device) for levels in (FOUR, THREE))

    # ------------------------------------------------------------------------------------------ the store's side

    def load(self, data: bytes, fragment: Fragment) -> Values:
        self._has_begun = True
        return self._genesis.pop(bytes(data))

    def parts(self, values: Values) -> list[Any]:
        """A number of its own for each version: no file but those of a run's genesis is read back here."""
        data = self._serial()
        if not self._has_begun:
            self._genesis[data] = values
        return [memoryview(data)]

    def _serial(self) -> bytes:
        return next(self._serials).to_bytes(8, "little")

    # ------------------------------------------------------------------------------------------ the syncer's side

    @torch.no_grad()
    def inspect(self, codec: str, payload: Payload, fragment: Fragment) -> Inspection:
        """The norms, on the device. Nothing is damaged here, and a NaN shows in the loss, which ends the run."""
        norms: Any = _norms(payload.values, self._map(fragment))
        return Inspection(norms, finite=True, max_abs=0.0)

    def hold(self, codec: str, payload: Any, weight: float, seen: Inspection) -> Held:
        return Held(codec, payload, weight, seen.norms)

    @torch.no_grad()
    def merge(self, decision: Decision, fragment: Fragment, held: list[Held], threads: int = 1) -> Payload:
        """The merged delta as it is applied."""
        delta = self.delta(decision.rule, fragment, held)
        self._measure(fragment, held, delta)
        rounded = self.quantized(decision.delta, delta * decision.gain)
        return Payload(rounded, self.payload_bytes(decision.delta, fragment))

    def entry(self, delta: Payload) -> bytes:
        """No delta is read back here."""
        return self._serial()

    @torch.no_grad()
    def advance(self, step: Step, fragment: Fragment, old: Values, delta: Payload, threads: int = 1) -> Merged:
        """Outer step, published delta."""
        if is_multiple(step.version, step.restart):
            old = old._replace(velocity=torch.zeros_like(old.velocity))
        x, velocity = _OUTER[step.outer](step, old, delta.values)
        theta, error = self.publish(step.codec, x, old.theta)
        payload = Payload(theta, self.payload_bytes(step.codec, fragment))
        return Merged(Values(theta, velocity, error), payload, self.digest(theta), self._serial())

    def delta(self, rule: str, fragment: Fragment, held: Sequence[Any]) -> Tensor:
        """The contributions merged, as algo.merge does it."""
        values = torch.stack([_blocks(contribution.payload.values) for contribution in held])
        norms = torch.stack([contribution.norms for contribution in held])
        return _RULES[rule](self._map(fragment), values, norms, self._shares(held)).flatten()

    def _measure(self, fragment: Fragment, held: Sequence[Any], delta: Tensor) -> None:
        """How far learners agree with each other, and a merge with the one before it: cosines, kept on the device."""
        norms = torch.stack([contribution.norms.square().sum() for contribution in held]).sqrt()
        shares = self._shares(held)[:, 0]
        mean = _weighted(torch.stack([_blocks(c.payload.values) for c in held]), shares[:, None])
        alone = (shares * norms).square().sum()
        among = ((shares * norms).sum().square() - alone).clamp_min(NORM_MIN)
        agreement = (mean.square().sum(dtype=torch.float64) - alone) / among
        before = self._deltas.get(fragment.index, delta)
        echo = functional.cosine_similarity(delta, before, dim=0).double()
        self._deltas[fragment.index] = delta
        self._cosines.append(torch.stack((agreement, echo)))

    def cosines(self) -> tuple[float, float]:
        """Mean agreement and echo of all merges since the last time; waits for the device."""
        taken, self._cosines = self._cosines, []
        agreement, echo = torch.stack(taken).mean(0).tolist() if taken else (0.0, 0.0)
        return agreement, echo

    def publish(self, codec: str, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Θ' = Θ + Q(x − Θ), e' = x − Θ', the bits of algo.outer.advance."""
        theta_new = theta + self.quantized(codec, x - theta)
        return theta_new, x - theta_new

    def whole(self, theta: Tensor) -> Payload:
        return Payload(theta, 4 * theta.numel())

    def _shares(self, held: Sequence[Held]) -> Tensor:
        weights = [contribution.weight for contribution in held]
        total = math.fsum(weights)
        shares = torch.tensor([weight / total for weight in weights], dtype=torch.float64)
        if self.device.type == "cuda":  # from memory that is not pinned the copy would wait for the device
            shares = shares.pin_memory().to(self.device, non_blocking=True)
        return shares[:, None]

    def blocks_of(self, fragment: Fragment) -> Blocks:
        """A group is a slot."""
        counts = [(slot.padded_stop - slot.offset) // BLOCK for slot in fragment.slots]
        group = [index for index, count in enumerate(counts) for _ in range(count)]
        return Blocks(group, [slot.kind == "embedding" for slot in fragment.slots])

    def _map(self, fragment: Fragment) -> _Map:
        if fragment not in self._maps:
            blocks = self.blocks_of(fragment)
            group = torch.tensor(blocks.group)
            members = functional.one_hot(group, len(blocks.averaged)).T.double().contiguous()
            averaged = torch.tensor(blocks.averaged)
            self._maps[fragment] = _Map(*(each.to(self.device) for each in (group, members, averaged)))
        return self._maps[fragment]

    # ------------------------------------------------------------------------------------------ the learner's side

    @torch.no_grad()
    def encode(self, codec: str, drift: Tensor, residual: Tensor | None = None) -> Payload:
        u = drift if residual is None else drift + residual
        return Payload(self.quantized(codec, u), codecs.payload_bytes(codec, u.numel()))

    @torch.no_grad()
    def unsaid(self, codec: str, payload: Payload, drift: Tensor, residual: Tensor | None) -> Tensor:
        return (drift if residual is None else drift + residual) - payload.values

    def quantized(self, codec: str, x: Tensor) -> Tensor:
        """What is decoded once x is encoded, the bits of algo.codecs; a block with a NaN or infinity is all NaN."""
        if codec == "fp32":
            return x
        if codec == "bf16":
            return x.bfloat16().float()
        blocks = _blocks(x)
        if codec == "int2":
            return self._two_bits(blocks).flatten()
        top = torch.linalg.vector_norm(blocks, math.inf, dim=1, keepdim=True)
        scale = functional.threshold(top / self._levels[codec], BELOW_SCALE_MIN, 0.0)
        inverse = scale.reciprocal().nan_to_num_(math.nan, posinf=0.0)
        codes = (blocks * inverse).add_(float(kernels.ROUNDER)).sub_(float(kernels.ROUNDER))
        return codes.mul_(scale).flatten()

    def _two_bits(self, blocks: Tensor) -> Tensor:
        """As kernels._encode_int2 and _decode_int2 do it; the scale may be off by its last bit."""
        length = torch.linalg.vector_norm(blocks, dim=1, keepdim=True, dtype=torch.float64)
        count = torch.count_nonzero(blocks, dim=1)[:, None]
        rms = functional.threshold((length / count.clamp_min(1).double().sqrt()).float(), BELOW_SCALE_MIN, 0.0)
        middle, low, high = (torch.where(count < BLOCK, self._three, self._four) * rms).split(1, dim=1)
        return blocks.sign() * torch.where(blocks.abs() >= middle, high, low)

    def decode(self, codec: str, payload: Payload) -> Tensor:
        return payload.values

    def adopt(self, codec: str, payload: Payload, base: Tensor | None) -> Adopted:
        """The new base: that adding the decoded delta gives these bits is proved of algo.outer."""
        return Adopted(payload.values, self.digest(payload.values), is_finite=True)

    def first_spoiled(self, values: Tensor, fragment: Fragment) -> str:
        return ""

    # ------------------------------------------------------------------------------------------ both

    def digest(self, theta: Tensor) -> bytes:
        return id(theta).to_bytes(8, "little")

    def state_digest(self, values: Values) -> bytes:
        return self.digest(values.theta)

    def sha256(self, theta: Tensor) -> bytes:
        return self.digest(theta)

    def checksum(self, payload: Payload) -> bytes:
        return id(payload).to_bytes(8, "little")

    def payload_bytes(self, codec: str, fragment: Fragment) -> int:
        return codecs.payload_bytes(codec, fragment.size)


def _blocks(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK)


def _norms(x: Tensor, at: _Map) -> Tensor:
    squares = torch.linalg.vector_norm(_blocks(x), dim=1, dtype=torch.float64).square_()
    return (at.members * squares).sum(1).sqrt_()


# Merge rules: (learners, blocks, BLOCK) values, (learners, groups) norms and (learners, 1) shares to one delta.


def _weighted(values: Tensor, coefficients: Tensor) -> Tensor:
    """Σ c v over learners, c one number a learner or one a block of his."""
    return (values * coefficients.float()[..., None]).sum(0)


def _mean(at: _Map, values: Tensor, norms: Tensor, shares: Tensor) -> Tensor:
    return _weighted(values, shares)


def _radial_directional(at: _Map, values: Tensor, norms: Tensor, shares: Tensor) -> Tensor:
    inverse = torch.where(norms > NORM_MIN, norms.reciprocal(), 0.0)
    directions = _weighted(values, (shares * inverse)[:, at.group])
    radii = (shares * norms).sum(0)
    return _stretched(at, directions, radii, torch.full_like(radii, DIRECTION_MIN), _weighted(values, shares))


def _consensus(at: _Map, values: Tensor, norms: Tensor, shares: Tensor) -> Tensor:
    mean, mass = _weighted(values, shares), _weighted(values.abs(), shares)
    agreed = torch.where(mass > 0, mean.abs() / mass, 0.0) * mean
    radii = (shares * norms).sum(0)
    return _stretched(at, agreed, radii, (DIRECTION_MIN * radii).clamp_min(NORM_MIN), mean)


def _stretched(at: _Map, x: Tensor, radii: Tensor, shortest: Tensor, mean: Tensor) -> Tensor:
    """x with each group as long as its radius; the mean where x is too short to point the way, and of embeddings."""
    lengths = _norms(x, at)
    factors = (radii / torch.maximum(lengths, shortest)).float()
    is_mean = at.averaged | (lengths < shortest)
    return torch.where(is_mean[at.group][:, None], mean, x * factors[at.group][:, None])


_RULES: dict[str, Callable[[_Map, Tensor, Tensor, Tensor], Tensor]] = {
    "rda": _radial_directional,
    "mean": _mean,
    "consensus": _consensus,
}


# Outer steps: to (x, velocity), as in algo.outer.


def _nesterov(outer: Step, old: Values, delta: Tensor) -> tuple[Tensor, Tensor]:
    velocity = torch.add(delta, old.velocity, alpha=outer.momentum)
    step = torch.add(delta, velocity, alpha=outer.momentum)
    return (old.theta + old.error).add_(step, alpha=outer.lr), velocity


def _sgd(outer: Step, old: Values, delta: Tensor) -> tuple[Tensor, Tensor]:
    return (old.theta + old.error).add_(delta, alpha=outer.lr), torch.zeros_like(delta)


def _delayed(outer: Step, old: Values, delta: Tensor) -> tuple[Tensor, Tensor]:
    velocity = torch.add(old.velocity, delta, alpha=1 / outer.delay)
    step = delta
    if is_multiple(outer.version, outer.delay):
        velocity *= outer.momentum
        step = delta + velocity
    return (old.theta + old.error).add_(step, alpha=outer.lr), velocity


_OUTER: dict[str, Callable[[Step, Values, Tensor], tuple[Tensor, Tensor]]] = {
    "nesterov": _nesterov,
    "sgd": _sgd,
    "delayed": _delayed,
}
