"""The plan of a concrete run, all of it, as numbers and sentences.

Where no H that a run may have leaves the links or the syncer room, nothing is suggested and no goodput is expected.
Nor is anything suggested where the run is over before such an H; its work is merged at the end, and counts as goodput.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skerry.algo.codecs import payload_bytes
from skerry.plan import advice, needs
from skerry.plan.bandwidth import periods
from skerry.plan.syncs import RunPlan, Stretch, goodput, goodput_of, join_s, quorum_share, sizes_of, stretch


def report(plan: RunPlan) -> dict[str, Any]:
    sizes = sizes_of(plan)
    stretches = [stretch(plan, sizes, period) for period in periods(plan.config)]
    is_carried = advice.is_carried(plan, stretches[-1])
    config, count = plan.config, len(sizes)
    steady = stretches[-1]
    rounds, burst = max(s.rounds for s in stretches), max(s.burst for s in stretches)
    learner = needs.learner_memory(config, sizes, rounds, burst, plan.state)
    mean_period = 1 / sum(s.period.share / s.period_s for s in stretches)
    contributors = sum(min(1.0, steady.period_s / steady.period_of(s)) for s in steady.syncs)
    return {
        "run": config.run.name,
        "params": plan.layout.param_count,
        "tensors": len(plan.layout.tensors),
        "learners": len(plan.islands),
        "quorum": plan.quorum,
        "fragments": {
            "count": count,
            "elements": sizes,
            "largest": max(sizes),
            "smallest": min(sizes),
            "payload_bytes_up": payload_bytes(config.wire.codec_up, max(sizes)),
            "payload_bytes_down": payload_bytes(config.wire.codec_down, max(sizes)),
        },
        "phases": [_phase(plan, sizes, s, is_carried) for s in stretches],
        "join_s": {i.name: join_s(plan, sizes, i) for i in plan.islands},
        "memory": {
            "learner_host": learner["host"],
            "learner_device": learner["device"],
            "syncer": needs.syncer_memory(config, sizes, rounds),
        },
        "disk": needs.disk(config, sizes, 3600 * count / mean_period, contributors) | {"fixed": plan.fixed_bytes},
        "goodput": goodput(plan, sizes, stretches) if is_carried else 0.0,
        "quorum_share": quorum_share(plan, sizes),
        "suggested": advice.suggest(plan, stretches),
        "warnings": advice.warnings(plan, sizes, stretches),
    }


def _phase(plan: RunPlan, sizes: Sequence[int], at: Stretch, is_carried: bool) -> dict[str, Any]:
    wire, every = plan.config.wire, at.period.sync_every
    return {
        "phase": at.period.stage,
        "share": at.period.share,
        "sync_every": every,
        "sync_every_effective": at.period_s / plan.pace_s,
        "limited_by": at.limit,
        "merges_per_s": len(sizes) / at.period_s,
        "bytes_per_step_up": sum(payload_bytes(wire.codec_up, s) for s in sizes) / every,
        "bytes_per_step_down": sum(payload_bytes(wire.codec_down, s) for s in sizes) / every,
        "fragments_at_once": at.burst,
        "rounds_open_max": at.rounds,
        "grace_s": at.grace_s,
        "fits": all(s.fits for s in at.syncs),
        "learners": [
            {
                "learner": s.island.name,
                "up_s": s.up_s,
                "down_s": s.down_s,
                "sync_s": s.sync_s,
                "sync_steps": s.steps,
                "fits": s.fits,
                "link_load": s.load,
                "versions_behind": s.behind,
                "sync_every_effective": at.period_of(s) / s.island.step_s,
                "goodput": goodput_of(plan, sizes, at, s) if is_carried else 0.0,
            }
            for s in at.syncs
        ],
    }
