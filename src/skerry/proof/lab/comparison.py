"""What a study found: a row a variant, held against the baseline seed by seed.

Rules that hold here: a comparison is paired, each seed with the same seed of the baseline, because seeds differ from
each other by more than variants do; an interval is Student's at 95 %, and one seed has none; a run that diverged is
counted and told, and is in no mean. Shares and differences are fractions, not per cent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from skerry.proof.lab.results import Results
from skerry.proof.lab.study import Result, Study
from skerry.stats import half_width

MANY_TOKENS = 0.01  # a difference in tokens above this makes losses hard to compare


class Row(Struct, frozen=True, kw_only=True):
    """A variant over its seeds; None where nothing can be said. An interval is half as wide as what it spans."""

    variant: str
    seeds: tuple[int, ...]
    losses: tuple[float, ...]  # NaN: diverged
    loss: float | None
    interval: float | None
    against: float | None
    against_interval: float | None
    against_seeds: int
    megabytes: float | None  # up and down, per learner
    bytes_per_parameter: float | None  # per learner
    contributors: float | None
    discarded: float | None
    seconds: float | None
    diverged: int


class Missing(Struct, frozen=True):
    variant: str
    seed: int


class Table(Struct, frozen=True, kw_only=True):
    study: str
    about: str
    baseline: str
    variants: tuple[Row, ...]
    missing: tuple[Missing, ...]
    notes: tuple[str, ...]


def table_of(study: Study, results: Results) -> Table:
    found = found_of(study, results)
    baseline = baseline_of(study, results)
    wanted = {variant: study.seeds for variant in study.variants}
    if study.baseline and study.baseline not in wanted:
        wanted[study.baseline] = study.seeds
    have = found | {study.baseline: baseline}
    return Table(
        study=study.name,
        about=study.about,
        baseline=study.baseline,
        variants=tuple(_row(name, found[name], baseline if name != study.baseline else {}) for name in study.variants),
        missing=tuple(Missing(name, seed) for name in wanted for seed in wanted[name] if seed not in have[name]),
        notes=tuple(_notes(study, found, baseline)),
    )


def found_of(study: Study, results: Results) -> dict[str, dict[int, Result]]:
    """By chosen variant and seed."""
    found: dict[str, dict[int, Result]] = {variant: {} for variant in study.variants}
    for job in study.chosen:
        if (result := results.of(job)) is not None:
            found[job.variant][job.seed] = result
    return found


def baseline_of(study: Study, results: Results) -> dict[int, Result]:
    """By seed; a baseline like study:variant is another study's, as it stands in the results."""
    if ":" in study.baseline:
        borrowed = results.named(*study.baseline.split(":", 1))
        return {seed: borrowed[seed] for seed in study.seeds if seed in borrowed}
    jobs = [job for job in study.jobs if job.variant == study.baseline]
    return {job.seed: result for job in jobs if (result := results.of(job)) is not None}


def is_lost(result: Result) -> bool:
    return result.diverged or not math.isfinite(result.loss)


def mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _row(variant: str, found: Mapping[int, Result], baseline: Mapping[int, Result]) -> Row:
    sound = {seed: result for seed, result in found.items() if not is_lost(result)}
    losses = [result.loss for result in sound.values()]
    against = [
        result.loss / baseline[seed].loss - 1
        for seed, result in sound.items()
        if seed in baseline and not is_lost(baseline[seed])
    ]
    return Row(
        variant=variant,
        seeds=tuple(found),
        losses=tuple(math.nan if is_lost(result) else result.loss for result in found.values()),
        loss=mean(losses),
        interval=half_width(losses),
        against=mean(against),
        against_interval=half_width(against),
        against_seeds=len(against),
        megabytes=mean([_bytes(result) / 1e6 for result in sound.values()]),
        bytes_per_parameter=mean([bytes_per_parameter(result) for result in sound.values()]),
        contributors=mean([result.contributors for result in sound.values()]),
        discarded=mean([_discarded(result) for result in sound.values()]),
        seconds=mean([result.seconds for result in sound.values()]),
        diverged=len(found) - len(sound),
    )


def _bytes(result: Result) -> float:
    learners: int = result.config["run"]["learners"]
    return (result.bytes_up + result.bytes_down) / learners


def bytes_per_parameter(result: Result) -> float:
    return _bytes(result) / result.parameters


def _discarded(result: Result) -> float:
    produced = result.tokens + result.tokens_discarded
    return result.tokens_discarded / produced if produced else 0.0


def _notes(study: Study, found: Mapping[str, Mapping[int, Result]], baseline: Mapping[int, Result]) -> Iterable[str]:
    """What makes losses hard to compare."""
    everyone = [*(result for variant in found.values() for result in variant.values()), *baseline.values()]
    for what in ("python", "torch", "skerry"):
        versions = sorted({result.versions.get(what, "?") for result in everyone})
        if len(versions) > 1:
            text = " (and the standard library is the text)" if what == "python" and _is_stdlib(everyone) else ""
            yield f"results come from {what} {' and '.join(versions)}{text}"
    devices = sorted({result.device for result in everyone})
    if len(devices) > 1:
        yield f"results come from several devices: {', '.join(devices)}"
    for variant, by_seed in found.items():
        pairs = [(result.tokens, baseline[seed].tokens) for seed, result in by_seed.items() if seed in baseline]
        apart = [pair for pair in pairs if abs(pair[0] / pair[1] - 1) > MANY_TOKENS]
        if apart and not all(is_lost(result) for result in by_seed.values()):
            yield f"{variant} kept {apart[0][0]:,} tokens, {study.baseline} {apart[0][1]:,}"


def _is_stdlib(results: Iterable[Result]) -> bool:
    return any(result.config["data"]["path"] == "stdlib" for result in results)
