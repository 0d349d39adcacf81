"""Links: the rate a site needs for a utilisation, and the utilisation a rate gives; data-parallel and Skerry.

Everywhere T is the seconds of a step's arithmetic, B a link's bit/s (each way: links carry both directions at once) and
utilisation = T / (seconds a step takes in all).

Data-parallel: every step all-reduces 16 bits a parameter over a ring of n sites, so V · 2 (n − 1) / n bits leave each
site; what fits under the backward pass, two thirds of a step, is hidden.

    step = T + max(0, V · 2 (n − 1) / n / B − 2/3 T)

Skerry: every learner exchanges P/H fragments a step with the syncer, up and down in their codecs, with block scales.
Nothing is reduced within a site. Learners never wait, so all of a step hides traffic; the utilisation is that of
learners which would wait for a late sync, so that H and τ hold. They do not: H grows instead, by the same factor.

    step = max(T, max(up, down) / B, (up + down of one boundary's fragments) / (τ B))

The first bound is the flow, the second that a fragment's way up and down ends within τ steps. A run's utilisation is
over all its phases, the warm one with its own H and its share of the run. Frame headers (0.02 %) are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import BLOCK, fragments_wanted, padded
from skerry.config import Config
from skerry.core.schedule import sync_every_in
from skerry.core.vocabulary import Stage

GRADIENT_BITS = 16  # of one parameter in a data-parallel all-reduce
HIDDEN = 2 / 3  # of a data-parallel step: the backward pass


class Period(NamedTuple):
    """A stretch of the run with one H: `share` of its progress."""

    stage: Stage
    share: float
    sync_every: int


class Load(NamedTuple):
    """What one learner's traffic puts on a link, in bits of one period."""

    period: Period
    up: float  # per step
    down: float
    burst: float  # up and down of the fragments of one boundary

    def busiest(self, delay: int) -> float:
        """Bits that must pass, one way, in each step."""
        return max(self.up, self.down, self.burst / delay)


def periods(config: Config) -> list[Period]:
    """The run as stretches of one H, warm and steady; where its steps are not known, the warm one at its longest."""
    sync, steps = config.sync, config.run.steps
    warm = sync.warm_share if sync.policy == "auto" else 0.0
    if steps:
        warm = min(warm, sync.warm_steps / steps)
    shares: dict[Stage, float] = {"warm": warm, "steady": 1 - warm}
    return [Period(stage, share, sync_every_in(sync, stage)) for stage, share in shares.items() if share]


def bits_per_element(codec: str) -> float:
    return 8 * payload_bytes(codec, BLOCK) / BLOCK


def loads(config: Config, params: float) -> list[Load]:
    """One learner's traffic in each period, its fragments taken as equal."""
    count = fragments_wanted(params, config.sync.num_fragments)
    size = padded(math.ceil(params / count))
    up, down = (8 * payload_bytes(codec, size) for codec in (config.wire.codec_up, config.wire.codec_down))
    found = []
    for period in periods(config):
        per_step = count / period.sync_every
        found.append(Load(period, up * per_step, down * per_step, (up + down) * math.ceil(per_step)))
    return found


# ---------------------------------------------------------------------------------------------- utilisation and rate


def ring(sites: int) -> float:
    """Copies of the data that leave each member in a ring all-reduce."""
    return 2 * (sites - 1) / sites


def exposed_utilisation(bits: float, hidden: float, step_s: float, rate: float) -> float:
    """T / (T + max(0, bits / B − hidden T))."""
    return step_s / (step_s + max(0.0, bits / rate - hidden * step_s))


def exposed_rate(bits: float, hidden: float, step_s: float, utilisation: float) -> float:
    """The same, solved for B; utilisation below 1 leaves some of it exposed."""
    return bits / (step_s * (1 / utilisation - 1 + hidden))


def skerry_utilisation(load: Iterable[Load], delay: int, learners: int, step_s: float, rate: float) -> float:
    """Of the whole run, `learners` sharing a link of `rate`."""
    spent = sum(x.period.share * max(step_s, learners * x.busiest(delay) / rate) for x in load)
    return step_s / spent


def skerry_rate(load: list[Load], delay: int, learners: int, step_s: float, utilisation: float) -> float:
    """The least rate of a link with this utilisation."""
    enough = learners * max(x.busiest(delay) for x in load) / step_s
    return _least(lambda rate: skerry_utilisation(load, delay, learners, step_s, rate) >= utilisation, enough)


def _least(is_enough: Callable[[float], bool], high: float) -> float:
    """The least rate that is enough, by bisection below one that is."""
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


# ---------------------------------------------------------------------------------------------- a plan


class Question(NamedTuple):
    params: float
    step_s: float
    sites: int
    learners: int
    utilisation: float
    link: float | None = None  # bit/s


def answer(q: Question, config: Config) -> dict[str, Any]:
    """Everything about one setting, rates in Gbit/s."""
    load, delay = loads(config, q.params), config.sync.fragment_sync_delay
    here = math.ceil(q.learners / q.sites)  # learners of the fullest site
    abroad = q.learners - here  # those whose traffic crosses the link of the syncer's site, if it sits there
    dp_bits = GRADIENT_BITS * q.params * ring(q.sites)
    dp = exposed_rate(dp_bits, HIDDEN, q.step_s, q.utilisation)
    skerry = skerry_rate(load, delay, here, q.step_s, q.utilisation)
    told: dict[str, Any] = {
        "params": q.params,
        "step_s": q.step_s,
        "sites": q.sites,
        "learners": q.learners,
        "learners_per_site": here,
        "utilisation": q.utilisation,
        "fragments": fragments_wanted(q.params, config.sync.num_fragments),
        "delay": delay,
        "data_parallel": {"bits_per_param": GRADIENT_BITS, "gbit_per_step": dp_bits / 1e9, "gbit_s": dp / 1e9},
        "skerry": {
            "codec_up": config.wire.codec_up,
            "codec_down": config.wire.codec_down,
            "bits_per_param_up": bits_per_element(config.wire.codec_up),
            "bits_per_param_down": bits_per_element(config.wire.codec_down),
            "gbit_s": skerry / 1e9,
            "syncer_site_gbit_s": skerry_rate(load, delay, abroad, q.step_s, q.utilisation) / 1e9,
            "phases": [_phase(x, delay, here, q) for x in load],
        },
        "ratio": dp / skerry,
    }
    if q.link is not None:
        told["at_link"] = {
            "gbit_s": q.link / 1e9,
            "data_parallel": exposed_utilisation(dp_bits, HIDDEN, q.step_s, q.link),
            "skerry": skerry_utilisation(load, delay, here, q.step_s, q.link),
            "skerry_syncer_site": skerry_utilisation(load, delay, abroad, q.step_s, q.link),
        }
    return told


def _phase(x: Load, delay: int, here: int, q: Question) -> dict[str, Any]:
    told: dict[str, Any] = {
        "phase": x.period.stage,
        "share": x.period.share,
        "sync_every": x.period.sync_every,
        "gbit_per_step_up": here * x.up / 1e9,
        "gbit_per_step_down": here * x.down / 1e9,
        "gbit_s": here * x.busiest(delay) / q.step_s * q.utilisation / 1e9,
    }
    if q.link is not None:
        told["sync_every_effective"] = x.period.sync_every * max(1.0, here * x.busiest(delay) / q.link / q.step_s)
    return told
