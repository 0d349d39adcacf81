"""The record of a run in the format that Prometheus reads: names, units and help texts as that world has them.

Everything is worked out anew when somebody asks, from the record that the page shows: the two cannot disagree. The
dashboard and the alerts in docs/grafana use these names, and a test holds them against what is given here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

__all__ = ["CONTENT_TYPE", "exposition"]

STATES = ("training", "joining", "stalled", "stopped", "leaving", "left", "lost", "expelled", "away", "finished")
SERVING = ("served", "starting", "away", "new", "paused", "died", "closed")


def exposition(record: Mapping[str, Any]) -> bytes:
    """What `/metrics` answers."""
    registry = CollectorRegistry()
    registry.register(_Collected(record))
    return bytes(generate_latest(registry))


class _Collected(Collector):
    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = record

    def collect(self) -> Iterable[Metric]:
        record = self._record
        yield _gauge("skerry_readable", "1 if the run directory could be read, else 0.", int("status" in record))
        if "status" in record:
            yield from _of_run(record["status"])
            yield from _of_work(record["status"])
            yield from _of_learners(record["status"])
            yield from _of_history(record.get("history", {}))
            yield _gauge("skerry_disk_free_bytes", "Bytes free on the run directory's disk.", record["disk_free_bytes"])


def _of_run(status: Mapping[str, Any]) -> Iterator[Metric]:
    yield InfoMetricFamily("skerry_run", "The run that is shown.", value={"run": str(status["run"])})
    serving = {state: int(status["serving"] == state) for state in SERVING}
    yield _gauges("skerry_serving", "1 for how the run is served at present, 0 for the other ways.", "state", serving)
    age_s = status["age_s"] if status["serving"] == "served" else math.nan
    yield _gauge(
        "skerry_status_age_seconds", "Seconds since the syncer was last heard of; NaN if nobody serves.", age_s
    )
    yield _gauge("skerry_progress_ratio", "Share of the budget that is spent.", status["progress"])
    yield _gauge("skerry_elapsed_seconds", "Seconds of training so far.", status["elapsed_s"])
    yield _counter(
        "skerry_syncer_restarts",
        "Syncer processes that took the run over after the first.",
        max(0, status["epoch"] - 1),
    )
    if "quorum" in status:
        yield _gauge("skerry_quorum", "Contributions that a merge needs (K).", status["quorum"])
        yield _gauge("skerry_learners_ready", "Learners that the quorum counts on.", status["ready"])
        yield _gauge("skerry_rounds_open", "Rounds that wait for contributions.", status["rounds_open"])
    every = {"asked": status["sync_every"], "configured": status.get("sync_every_configured", status["sync_every"])}
    every["reached"] = status.get("sync_every_reached") or math.nan
    about = "Steps between two merges of a fragment (H): as configured, as asked of learners now, as it turns out."
    yield _gauges("skerry_sync_every_steps", about, "kind", every)
    versions = {str(fragment): version for fragment, version in enumerate(status["versions"])}
    yield _gauges("skerry_fragment_version", "Newest version of each fragment.", "fragment", versions)
    if found := status.get("evaluated"):
        figures = {name: math.nan if value is None else value for name, value in found["figures"].items()}
        yield _gauges("skerry_evaluation", "What the model was last found to be worth, by figure.", "figure", figures)


def _of_work(status: Mapping[str, Any]) -> Iterator[Metric]:
    tokens = status["tokens"]
    fates = {"merged": tokens["merged"], **tokens["discarded"]}
    yield _counter("skerry_merges", "Merges committed.", status["merges"])
    merged = status["contributors_mean"] * status["merges"]
    contributions = round(merged) if math.isfinite(merged) else merged
    yield _counter("skerry_contributions_merged", "Contributions in these merges.", contributions)
    yield _counter("skerry_tokens_produced", "Tokens that learners reported to have worked on.", tokens["produced"])
    yield _counters("skerry_tokens", "Tokens whose work has its fate: merged, or why it was not.", "fate", fates)
    yield _gauge("skerry_tokens_pending", "Tokens whose work may still be merged.", tokens["pending"])
    about = "Contributions that were not taken, by reason, since this syncer began."
    yield _counters("skerry_contributions_refused", about, "reason", status.get("refused", {}))


def _of_learners(status: Mapping[str, Any]) -> Iterator[Metric]:
    learners = status["learners"]
    states = Counter(each["state"] for each in learners.values())
    counted = dict.fromkeys(STATES, 0) | states
    yield _gauges("skerry_learners", "Learners by what they do.", "state", counted)
    for key, name, about in (
        ("tokens_per_s", "skerry_learner_tokens_per_second", "Tokens a second of each learner, as it reports."),
        ("step_s", "skerry_learner_step_seconds", "Seconds that a step of each learner takes."),
        ("unmerged_steps", "skerry_learner_unmerged_steps", "Steps of each learner that are in no version yet."),
        ("loss", "skerry_learner_loss", "Training loss of each learner, where its loop says one."),
    ):
        said = {learner: each[key] for learner, each in learners.items() if each.get(key) is not None}
        if key != "loss" or any(said.values()):
            yield _gauges(name, about, "learner", said)


def _of_history(history: Mapping[str, Any]) -> Iterator[Metric]:
    if not history:
        return
    traffic = history["traffic"]
    ways = {way: traffic[way] for way in ("up", "down")}
    yield _counters("skerry_network_bytes", "Bytes between learners and the syncer, both ways.", "direction", ways)
    about = "Bytes that data-parallel training would have sent for the same steps."
    yield _counter("skerry_data_parallel_bytes", about, traffic["data_parallel"])
    about = "Produced less merged, discarded and pending: anything but 0 is a fault of the books."
    yield _gauge("skerry_ledger_imbalance_tokens", about, history["ledger_balance"])
    yield _counter("skerry_merges_alone", "Merges that had one contributor only.", history["merges_alone"])
    if history["goodput"] is not None:
        yield _gauge("skerry_goodput_ratio", "Tokens merged, of those that undisturbed learners would have made.",
                     history["goodput"])  # fmt: skip
    shares = {name: each["merged_share"] for name, each in history["learners"].items()}
    yield _gauges("skerry_learner_merged_share_ratio", "Share of all merged tokens, by learner.", "learner", shares)


# ---------------------------------------------------------------------------------------------- families


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(name, about, value=value)


def _gauges(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labelled(GaugeMetricFamily(name, about, labels=[label]), values)


def _counters(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labelled(CounterMetricFamily(name, about, labels=[label]), values)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for one, value in values.items():
        family.add_metric([one], math.nan if value is None else value)
    return family
