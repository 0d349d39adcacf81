"""What four faults cost a run of Skerry and plain data-parallel training, side by side.

For each fault a fresh local run and a fresh run of plain torch DDP (`ddp.py`), one after the other, of the same model
on the same text at the same pace: for a while undisturbed, then as long under the fault.

Rules that hold here: a rate is tokens/s of steps completed, on both sides; both windows begin when every learner has
stepped. Of Skerry's tokens it is also told which share was merged in the end. What a fault itself takes away (a dead
learner's quarter) is told apart from what is lost beyond it; noise below zero is told as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skerry import config as configs
from skerry.engines.spec import learners
from skerry.errors import NetworkError, RunFailed
from skerry.proof.chaos import ddp, report
from skerry.proof.chaos.ddp_net import DELAY_MS, RATE, Network
from skerry.proof.chaos.plan import Fault
from skerry.proof.chaos.proxy import Proxy
from skerry.proof.chaos.supervisor import ChaosRun
from skerry.run.tally import end_of
from skerry.train.held_out import HeldOut
from skerry.train.start import create

WARM_S = 2.0  # from the first step of the last learner to the undisturbed window
SPARE_S = 4.0  # in a run, for learners that come up later than the first


@dataclass
class Resilience:
    """What the rows of one table have in common; `violations` are those of all of them so far."""

    config: configs.Config
    held_out: HeldOut
    out: Path
    seconds: float
    show: ddp.Show
    violations: list[str] = field(default_factory=list)

    def row(self, fault: str) -> dict[str, Any]:
        lost = share_lost(fault, self.config.run.learners)
        return {"fault": fault, "share_lost": lost, "skerry": self._skerry(fault, lost), "ddp": self._ddp(fault, lost)}

    def _ddp(self, fault: str, lost: float) -> dict[str, Any]:
        r = ddp.measure(
            self.config, fault, learners=self.config.run.learners, seconds=self.seconds, warm_s=WARM_S, show=self.show
        )
        if not r.measured:
            return {"measured": False, "why_not": r.why_not}
        impact = impact_of(r.rate_before, r.rate_during, lost)
        return {"measured": True, **impact, "is_bound": r.is_bound, "what_happened": r.what_happened}

    def _skerry(self, fault: str, lost: float) -> dict[str, Any]:
        run_dir = self.out / fault.replace(" ", "-")
        speeds = [1.0] * self.config.run.learners
        delay_s = _delay_s() if fault == ddp.WAN else 0.0
        faults = faults_of(fault, len(speeds), WARM_S + self.seconds, self.seconds, delay_s)
        create(run_dir, self.config, self.held_out.model)
        with Proxy(self.config.run.seed) as proxy:
            own = ["--data", self.config.data.path]
            watched = Watched(run_dir, [learners(speeds)], [], learner_arguments=own, faults=list(faults), proxy=proxy)
            watched.run(lambda: self.show(f"Skerry, {fault}: {watched.doing(self.seconds)}"))
        watched.write_to_tape()
        return self._result(watched, fault, lost, _told(fault, faults))

    def _result(self, watched: Watched, fault: str, lost: float, what_happened: str) -> dict[str, Any]:
        tally, audit = report.read(watched.run_dir)
        struck = max((one.at for one in watched.done), default=time.time())
        end = struck + self.seconds
        if watched.faults or end_of(tally) < end:
            raise RunFailed(
                f"{fault}: the learners did not come up within {SPARE_S:g} s of each other: this machine is too busy; "
                f"try again, or with fewer --learners (logs: {watched.run_dir / 'logs'})"
            )
        found = report.violations(tally, audit, watched.run_dir, watched.crashes, {})
        self.violations += [f"{fault}: {one}" for one in found]
        before = rate_of(watched.looks, watched.done[0].at - self.seconds, watched.done[0].at)
        return {
            **impact_of(before, rate_of(watched.looks, struck, end), lost),
            "merges_during": sum(struck < at <= end for at, _ in tally.merges),
            "merged_share": tally.merged / tally.produced,
            "violations": len(found),
            "what_happened": what_happened,
        }


@dataclass
class Watched(ChaosRun):
    """A run whose faults count from when every learner has stepped; `looks` is how many tokens there were when."""

    looks: list[tuple[float, int]] = field(default_factory=list)

    def disturb(self) -> None:
        members = self.status["learners"].values()
        if not self.looks or self.looks[-1][0] < self.status["at"]:
            self.looks.append((self.status["at"], sum(member["tokens"] for member in members)))
        if self.began is not None or sum(member["step"] > 0 for member in members) == len(self.learners):
            super().disturb()

    def doing(self, seconds: float) -> str:
        """For a person."""
        passed_s = time.monotonic() - self.began if self.began is not None else 0.0
        left_s = WARM_S + seconds - passed_s
        if self.began is None:
            return "starting"
        if left_s > seconds:
            return f"warming up, {left_s - seconds:.0f} s to go"
        if left_s > 0:
            return f"undisturbed, {left_s:.0f} s to go"
        return f"under the fault for {-left_s:.0f} s" if -left_s < seconds else "ending"


def faults_of(fault: str, learners: int, at_s: float, for_s: float, delay_s: float) -> list[Fault]:
    """What is done to which learners: to the last ones, as with the ranks."""
    names = [f"learner-{n}" for n in range(learners)]
    if fault == ddp.FAILED_LEARNER:
        return [Fault("kill", names[-1], at_s, for_s, {})]
    if fault == ddp.REGIONAL_OUTAGE:
        return [Fault("kill", name, at_s, for_s, {}) for name in names[-(learners // 2) :]]
    if fault == ddp.THROTTLING:
        return [Fault("slow", names[-1], at_s, for_s, {"speed": 1 / ddp.THROTTLE})]
    narrow = [Fault("bandwidth", name, at_s, for_s, {"mbit": float(RATE.removesuffix("mbit"))}) for name in names]
    return [*narrow, *(Fault("delay", name, at_s, for_s, {"delay_s": delay_s}) for name in names if delay_s)]


def share_lost(fault: str, learners: int) -> float:
    """The share of all computing that the fault itself takes away."""
    if fault == ddp.FAILED_LEARNER:
        return 1 / learners
    if fault == ddp.REGIONAL_OUTAGE:
        return learners // 2 / learners
    return (1 - 1 / ddp.THROTTLE) / learners if fault == ddp.THROTTLING else 0.0


def impact_of(before: float, during: float, lost: float) -> dict[str, float]:
    return {
        "impact": 1 - during / before,
        "impact_beyond": 1 - during / (before * (1 - lost)),
        "rate_before": before,
        "rate_during": during,
    }


def rate_of(looks: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Tokens/s of all learners between the first and the last look in a window."""
    inside = [look for look in looks if begin < look[0] <= end]
    if len(inside) < 2:
        raise RunFailed(f"the syncer wrote its status {len(inside)} times in {end - begin:g} s; measure for longer")
    (first_at, first), (last_at, last) = inside[0], inside[-1]
    return (last - first) / (last_at - first_at)


def _delay_s() -> float:
    """One way: what the other half's links are delayed by, nothing where this kernel cannot."""
    try:
        with Network(2) as network:
            return DELAY_MS / 1000 if network.has_delay else 0.0
    except NetworkError:
        return 0.0


def _told(fault: str, faults: Sequence[Fault]) -> str:
    names = ", ".join(dict.fromkeys(one.target for one in faults))
    if fault == ddp.THROTTLING:
        return f"{names} at 1/{ddp.THROTTLE} of its pace"
    if fault == ddp.WAN:
        delays = [one.parameters["delay_s"] for one in faults if one.kind == "delay"]
        return f"every learner's link at {RATE} each way, " + (f"{DELAY_MS} ms one way" if delays else "no delay")
    return f"{names} killed and away"
