"""A run in the laboratory: repeatable to the bit, its books balance in any weather, and training is left as it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from e2e.processes import facts_of
from skerry import config as configs
from skerry.algo import codecs
from skerry.algo.fragments import Fragment, gather
from skerry.config import Config
from skerry.core.audit import Audit
from skerry.core.facts import Committed, Decision, Discarded, Fact, Ordered, Sampled, Witnessed
from skerry.node.algebra import Merged, Values
from skerry.proof.lab.feed import HELD_OUT_ROWS
from skerry.proof.lab.job import CURVE_BATCHES, run
from skerry.proof.lab.laboratory import STEP_S, Laboratory
from skerry.proof.lab.results import Results
from skerry.proof.lab.study import Job, Result, Setting, Trial
from skerry.run.delays import NONE, Delays
from skerry.train.data import Corpus, Stream, held_out_batches
from skerry.train.gpt import GPT
from skerry.train.inner import Inner, held_out_loss
from skerry.train.loop import model_of

LEARNERS, STEPS, BATCH, CONTEXT = 3, 40, 2, 16
STEP_TOKENS = BATCH * CONTEXT
SMALL = {
    "run.learners": LEARNERS, "run.steps": STEPS, "data.batch": BATCH, "data.bytes_max": 200_000,
    "model.layers": 1, "model.width": 16, "model.heads": 1, "model.context": CONTEXT,
    "sync.num_fragments": 4, "sync.sync_every": 8,
}  # fmt: skip
MBIT_S = 0.02  # a fragment takes about four steps
SLOW = Delays(encode_ns=1e5, adopt_ns=2e5, inspect_ns=1e4, merge_ns=2e5, commit_s=0.1)  # a sync takes steps
OUTAGE = {"outage_at": 0.5, "outage_steps": 30}
DEATHS = {"speeds": (1, 0.5), "dead_share": 0.3, "dead_steps": 6}


def job_of(changes: dict[str, Any] | None = None, **setting: Any) -> Job:
    config = configs.resolve(configs.default(), None, (SMALL | (changes or {})).items())
    lab = Setting(**{"points": 4, "held_out": 4} | setting)
    return Job(study="study", variant="variant", seed=config.run.seed, config=config, setting=lab)


def lived(job: Job, folder: Path, each_tick: Callable[[Laboratory], None] = lambda world: None) -> Laboratory:
    world = Laboratory(job, "cpu", folder / "run")
    world.run(lambda: each_tick(world))
    return world


def steps_by_learner(world: Laboratory) -> list[int]:
    """Over all lives, as the syncer has seen them."""
    accounts = world.syncer.machine.state.ledger.accounts.items()
    return [sum(a.step for key, a in accounts if key.startswith(island.name)) for island in world.islands]


# ---------------------------------------------------------------------------------------------- the same again


def test_the_same_job_gives_the_same_bits_and_another_seed_others() -> None:
    job, other = job_of(**DEATHS), job_of({"run.seed": 1}, **DEATHS)
    first, again, differs = (timeless(run(each, "cpu")) for each in (job, job, other))
    assert len(first.points) == 3 and first == again
    assert first.loss != differs.loss and first.points[0].loss != differs.points[0].loss


def timeless(result: Result) -> Result:
    return msgspec.structs.replace(result, seconds=0.0)


# ---------------------------------------------------------------------------------------------- in any weather


WEATHERS: dict[str, Job] = {
    "equal speeds": job_of(),
    "unequal speeds and deaths": job_of(**DEATHS),
    "one comes for the middle half": job_of(away_half=1),
    "a slow link": job_of(mbit_s=MBIT_S),
    "the syncer is away": job_of({"learner.alone_steps_max": 10}, **OUTAGE),
    "slow machines": job_of(delays=SLOW),
    "overwrite": job_of({"learner.adopt": "overwrite"}, speeds=(1, 0.5)),
    "blend": job_of({"learner.adopt": "blend"}, speeds=(1, 0.5)),
    "int8": job_of({"wire.codec_up": "int8", "wire.codec_down": "int8"}),
    "int2": job_of({"wire.codec_up": "int2", "wire.codec_down": "int2"}),
}


class Lived:
    """A run that has ended, and its tape."""

    def __init__(self, weather: str, folder: Path) -> None:
        self.weather = weather
        self.world = lived(WEATHERS[weather], folder)
        self.state = self.world.syncer.machine.state
        self.facts: list[Fact] = facts_of(folder / "run")
        self.decisions = [fact.decision for fact in self.facts if isinstance(fact, Committed)]

    def payload_bytes(self, codec: str, fragment: int) -> int:
        return codecs.payload_bytes(codec, self.world.fragments[fragment].size)


@pytest.fixture(scope="module", params=WEATHERS)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lived:
    torch.set_num_threads(1)
    return Lived(request.param, tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Lived:
    return Lived("unequal speeds and deaths", tmp_path_factory.mktemp("world"))


def test_the_books_balance_and_nothing_is_pending(done: Lived) -> None:
    done.state.ledger.check()
    totals = done.state.ledger.totals()
    assert done.state.phase == "closed" and totals.balance == totals.pending == 0
    assert totals.merged > 0.5 * totals.produced
    assert totals.produced == STEP_TOKENS * len(done.world.fragments) * done.state.ledger.steps
    assert done.state.ledger.steps >= STEPS * LEARNERS
    if done.weather != "unequal speeds and deaths":  # one that dies takes its last steps with it unseen
        assert steps_by_learner(done.world) == done.world.stack.counts.tolist()
        assert totals.discarded.keys() <= {"fast-forward"}


def test_the_tape_passes_the_products_own_audit(done: Lived) -> None:
    audit = Audit()
    for fact in done.facts:
        audit.take(fact)
    assert not audit.violations and audit.checks > 10 * done.state.merges
    assert audit.state is not None and audit.state.phase == "closed"
    assert audit.state.ledger.totals() == done.state.ledger.totals()


def test_the_bytes_are_what_the_codecs_weigh(done: Lived) -> None:
    """Up, all that was merged; what a dead learner had on its way, or what was taken for lost, comes on top."""
    world = done.world
    merged = sum(done.payload_bytes(part.codec, d.fragment) for d in done.decisions for part in d.parts)
    if done.weather in ("unequal speeds and deaths", "slow machines"):
        assert merged <= world.payload_bytes["up"] < 1.2 * merged
    else:
        assert merged == world.payload_bytes["up"]
    wire, last = world.config.wire, {"fp32"}
    trained, closed = ({part.codec for d in done.decisions if d.is_closing == is_closing for part in d.parts}
                       for is_closing in (False, True))  # fmt: skip
    assert trained == {wire.codec_up} and last <= closed <= last | {wire.codec_up}


def test_every_learner_is_told_every_version_once(tmp_path: Path) -> None:
    done = Lived("equal speeds", tmp_path)
    genesis = sum(done.payload_bytes("fp32", fragment.index) for fragment in done.world.fragments)
    versions = sum(done.payload_bytes(d.codec, d.fragment) for d in done.decisions)
    assert done.world.payload_bytes["down"] == LEARNERS * (genesis + versions)


def test_the_model_learns(done: Lived) -> None:
    world = done.world
    text = world.feed.held_out(8)
    assert world.stack.held_out(world.master(), text) < world.stack.held_out(world.stack.initial(), text)


# ---------------------------------------------------------------------------------------------- slow, dead or away


def test_a_death_ends_a_life_and_what_it_had_pending(deaths: Lived) -> None:
    lives = {name: life.life for name, life in deaths.state.lives.items()}
    assert len(lives) == LEARNERS and max(lives.values()) > 1
    over = {(name, life) for name, newest in lives.items() for life in range(1, newest)}
    assert over <= {(f.learner, f.life) for f in deaths.facts if isinstance(f, Witnessed) and f.what == "lost"}
    rows = [row for fact in deaths.facts if isinstance(fact, Discarded) for row in fact.rows if row.fate == "died"]
    assert sum(row.tokens for row in rows) == deaths.state.ledger.discarded["died"] > 0
    assert {(row.learner, row.life) for row in rows} <= over


def test_a_learner_is_dead_for_the_share_of_time_it_was_said_to_be(tmp_path: Path) -> None:
    dead: list[float] = []
    lived(
        job_of({"run.steps": 80, "run.learners": 6}, dead_share=0.3, dead_steps=3),
        tmp_path,
        lambda world: dead.append(np.mean([not island.is_alive for island in world.islands])),
    )
    assert 0.2 < np.mean(dead) < 0.4


def test_a_learner_that_comes_back_goes_on_in_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch twice but those of steps nobody had heard of, and none left out."""
    world = Laboratory(job_of(dead_share=0.3, dead_steps=6), "cpu", tmp_path / "run")
    sought: list[tuple[int, int]] = []  # position before and after
    seek = Stream.seek

    def noted(stream: Stream, to: int) -> None:
        sought.append((stream.position, to))
        seek(stream, to)

    monkeypatch.setattr(Stream, "seek", noted)
    world.run(lambda: None)
    again = [(before, after) for before, after in sought if before]
    assert again and all(before - 2 <= after <= before for before, after in again)


def test_a_learner_of_a_quarter_of_the_speed_takes_a_quarter_of_the_steps_and_part_in_merges(tmp_path: Path) -> None:
    world = lived(job_of(speeds=(1, 1, 0.25)), tmp_path)
    fast, also_fast, slow = steps_by_learner(world)
    assert abs(fast - also_fast) <= 1 and abs(slow - fast / 4) <= 1
    decisions = [fact.decision for fact in facts_of(tmp_path / "run") if isinstance(fact, Committed)]
    present = [one for one in decisions if any(row.learner == world.islands[2].name for row in one.rows)]
    assert len(present) > len(decisions) / 2


def test_one_that_is_away_comes_for_the_middle_half(tmp_path: Path) -> None:
    seen: list[tuple[float, int]] = []
    world = lived(job_of(away_half=1), tmp_path, lambda w: seen.append((w.progress, int(w.stack.counts[2]))))
    assert [steps for progress, steps in seen if progress < 0.25] == [0] * sum(p < 0.25 for p, _ in seen)
    left = max(steps for progress, steps in seen if progress < 0.8)
    assert left == seen[-1][1] and abs(left - STEPS / 2) < STEPS / 10
    assert world.syncer.machine.state.lives["learner-002"].life == 1


def test_one_that_died_does_not_come_back_after_the_middle_half(tmp_path: Path) -> None:
    seen: list[tuple[float, int]] = []
    job = job_of(away_half=2, dead_share=0.6, dead_steps=4)
    lived(job, tmp_path, lambda w: seen.append((w.progress, sum(island._lives for island in w.islands[1:]))))
    (lives_then,) = {lives for progress, lives in seen if progress >= 0.75}
    assert lives_then > 2


def test_a_link_is_as_slow_as_it_was_said_to_be(tmp_path: Path) -> None:
    """By the product's own measurements on the tape."""
    lived(WEATHERS["a slow link"], tmp_path)
    samples = [s for fact in facts_of(tmp_path / "run") if isinstance(fact, Sampled) for s in fact.samples]
    up, down = [(s.up_bytes, s.up_s) for s in samples], [(s.down_bytes, s.down_s) for s in samples]
    assert any(sent for sent, _ in up) and any(sent for sent, _ in down)
    assert all(8e-6 * sent == pytest.approx(MBIT_S * took_s) for sent, took_s in up + down)


def test_work_takes_as_long_as_it_was_said_to(tmp_path: Path) -> None:
    """The least time from a snapshot to the version that has it, where the wire takes none."""
    work = Delays(encode_ns=1e5, adopt_ns=2e5, merge_ns=4e5, commit_s=0.1)
    spans = {}
    for name, delays in (("none", NONE), ("some", work)):
        job = job_of({"sync.policy": "fixed", "sync.sync_every": 1}, delays=delays, latency_s=0.0)
        world = lived(job, tmp_path / name)
        decisions = [fact.decision for fact in facts_of(tmp_path / name / "run") if isinstance(fact, Committed)]
        rows = [row for decision in decisions if not decision.is_closing for row in decision.rows]
        spans[name] = sum(row.steps for row in rows) / len(rows)
        size = sum(world.sizes) / len(world.sizes)
    sync_s = work.encode_s(size) + work.merge_s(size) + work.commit_s + work.adopt_s(size)
    assert spans["some"] > sync_s / STEP_S > 2 * spans["none"]


@pytest.mark.parametrize("latency_s", [0.0, 1.0])
def test_a_message_takes_as_long_as_it_was_said_to(latency_s: float, tmp_path: Path) -> None:
    """Hello, welcome, report and first versions go one after the other; adopted at a tick, begun at the next."""
    stepped_at: list[float] = []
    lived(
        job_of({"run.steps": 10}, latency_s=latency_s),
        tmp_path,
        lambda world: stepped_at.append(world.now) if world.stack.counts.all() else None,
    )
    assert 0 < stepped_at[0] - 2 * STEP_S - 4 * latency_s <= STEP_S


@pytest.mark.parametrize("keeps", [True, False])
def test_moments_outlive_a_process_only_where_they_are_kept(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Laboratory(job_of(dead_share=0.3, dead_steps=6, keep_optimizer=keeps), "cpu", tmp_path / "run")
    taken = np.zeros(LEARNERS, int)
    step = world.stack.step

    def counted(rows: list[int], *rest: Any) -> torch.Tensor:
        taken[rows] += 1
        return step(rows, *rest)

    monkeypatch.setattr(world.stack, "step", counted)
    world.run(lambda: None)
    machines = [island.driver.node.machine for island in world.islands]
    in_this_life = [machine.step_count for machine in machines if machine is not None]
    assert world.stack.counts.tolist() == (taken.tolist() if keeps else in_this_life)
    assert max(taken - in_this_life) > 0  # somebody did die


# ---------------------------------------------------------------------------------------------- training as it is


def test_what_is_done_to_a_learners_parameters_is_done_to_its_row_alone(tmp_path: Path) -> None:
    world = Laboratory(job_of(), "cpu", tmp_path / "run")
    island, fragment = world.islands[1], world.fragments[2]
    ones = torch.zeros(fragment.size)
    for slot in fragment.slots:
        ones[slot.offset : slot.offset + slot.size] = 1
    island.write(fragment, 4 * ones)
    snapshot = island.read(fragment)
    island.add(fragment, 2 * ones)
    island.blend(fragment, 10 * ones, 0.25)
    assert torch.equal(snapshot, 4 * ones)
    assert torch.equal(island.read(fragment), 9 * ones)
    assert world.stack.flat.count_nonzero() == world.stack.flat[1].count_nonzero() == ones.sum()


def test_the_loss_before_the_close_is_of_the_versions_the_tape_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Laboratory(job_of(), "cpu", tmp_path / "run")
    made: dict[tuple[int, int], Values] = {}
    advance = world.algebra.advance

    def kept(step: Decision, fragment: Fragment, *more: Any) -> Merged:
        merged = advance(step, fragment, *more)
        made[fragment.index, step.version] = merged.values
        return merged

    monkeypatch.setattr(world.algebra, "advance", kept)
    world.run(lambda: None)
    pinned = [made[at] for at in enumerate(world.syncer.machine.state.before_close)]
    assert torch.equal(world.master(world.before_close), world.master(pinned))
    assert not torch.equal(world.master(pinned), world.master())


def corpus_of(config: Config) -> Corpus:
    return Corpus.open(config.data.path, config.data.bytes_max)


def stream_of(config: Config, learner: int) -> Stream:
    return Stream(corpus_of(config), learner, config.run.seed, config.data.batch, CONTEXT)


def test_data_parallel_is_plain_training_on_all_batches_put_together() -> None:
    job = job_of({"learner.lr": 3e-3}, data_parallel=True)
    config = job.config
    result = run(job, "cpu")
    inner = Inner(model_of(config), config.learner.lr, config.learner.weight_decay)
    streams = [stream_of(config, learner) for learner in range(LEARNERS)]
    curve, final = (plain_text(config, count) for count in (CURVE_BATCHES, job.setting.held_out))
    losses = []
    for step in range(STEPS):
        drawn = [next(stream) for stream in streams]
        inner.step(*(np.concatenate(each) for each in zip(*drawn, strict=True)), step / STEPS)
        losses.append(held_out_loss(inner.model, curve))
    assert [point.loss for point in result.points] == pytest.approx([losses[9], losses[19], losses[29]], rel=1e-4)
    assert result.loss == pytest.approx(held_out_loss(inner.model, final), rel=1e-4)
    assert result.loss < losses[0] - 0.3
    assert (result.steps, result.tokens) == (STEPS, STEPS * LEARNERS * STEP_TOKENS)


def plain_text(config: Config, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return held_out_batches(corpus_of(config), HELD_OUT_ROWS, CONTEXT, count)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("is_rounded", "share"), [(False, 1e-4), (True, 2**-8)], ids=["exact", "as in the journal"])
def test_the_whole_protocol_changes_nothing_about_one_learners_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_rounded: bool, share: float, cut: bool
) -> None:
    """One learner, no codec, and an outer step that moves the model to where it is: as if it were alone.

    But for the rounding of merged deltas to what the journal keeps of them: no more than their last bit.
    """
    job = job_of(
        {
            "run.learners": 1, "learner.lr": 3e-3, "sync.policy": "fixed", "merge.rule": "mean", "outer.rule": "sgd",
            "outer.lr": 1.0, "wire.codec_up": "fp32", "wire.codec_down": "fp32",
            "sync.cut_tensors": cut, "sync.num_fragments": 9,
        }
    )  # fmt: skip
    world = Laboratory(job, "cpu", tmp_path / "run")
    assert cut == (sum(len(f.slots) for f in world.fragments) > len(world.layout.tensors))
    progress: list[float] = []  # at each step: the learner knows only what it was last told
    step = world.stack.step

    def noted(*arguments: Any) -> torch.Tensor:
        machine = world.islands[0].driver.node.machine
        assert machine is not None
        progress.append(machine.progress)
        return step(*arguments)

    monkeypatch.setattr(world.stack, "step", noted)
    if not is_rounded:
        monkeypatch.setattr(world.algebra, "quantized", lambda codec, x: x)
    world.run(lambda: None)
    alone = Inner(model_of(world.config), world.config.learner.lr, world.config.learner.weight_decay)
    first = flat_of(alone.model, world)
    stream = stream_of(world.config, 0)
    for at in progress:
        alone.step(*next(stream), at)
    last = flat_of(alone.model, world)
    assert len(progress) > STEPS and world.syncer.machine.state.merges > 4 * len(world.fragments)
    assert (world.master() - last).norm() < share * (last - first).norm()


def flat_of(model: GPT, world: Laboratory) -> torch.Tensor:
    arrays = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    flats = [torch.from_numpy(gather(fragment, arrays)) for fragment in world.fragments]
    return world.stack.row_of(world.fragments, flats)


@pytest.mark.parametrize("decay", [0.0, 10.0], ids=["far away", "not a number"])
@pytest.mark.parametrize(
    "setting", [{}, {"data_parallel": True}, {"points": 1}], ids=["seen", "data-parallel", "unseen"]
)
def test_a_run_that_blows_up_has_diverged_and_its_result_can_be_kept(
    decay: float, setting: dict[str, Any], tmp_path: Path
) -> None:
    """It is given up at the first look, and no better off if nobody looks before the end."""
    job = job_of({"learner.lr": 10.0, "learner.weight_decay": decay}, **setting)
    result = run(job, "cpu")
    assert len(result.points) == (job.setting.points > 1)
    assert all(math.isnan(point.loss) == (decay > 0) for point in result.points)
    assert result.diverged and result.loss == result.loss_before_close == pytest.approx(2 * math.log(256), rel=0.1)
    Results(tmp_path / "results.jsonl").append(result)
    kept = Results(tmp_path / "results.jsonl").of(job)
    assert msgspec.json.encode(kept) == msgspec.json.encode(result)


# ---------------------------------------------------------------------------------------------- the syncer is away


def away(tmp_path: Path, bound: int, **trial: Any) -> tuple[Laboratory, int]:
    """The world after an outage of the syncer, and the steps that were merged on all fragments; none is discarded."""
    world = lived(job_of({"learner.alone_steps_max": bound}, **OUTAGE, trial=Trial(**trial)), tmp_path)
    rows = [row for fact in facts_of(tmp_path / "run") if isinstance(fact, Committed) for row in fact.decision.rows]
    assert {row.fate for row in rows} == {"merged"}
    assert sum(row.steps for row in rows) == 4 * sum(steps_by_learner(world))
    return world, sum(row.steps for row in rows)


def test_lone_work_spends_the_budget_where_there_is_no_bound(tmp_path: Path) -> None:
    _, merged = away(tmp_path, 0)
    assert STEPS <= merged / (4 * LEARNERS) <= STEPS + 12, "half of the run, and an outage that spends the rest"


def test_lone_work_beyond_the_bound_is_merged_and_spends_nothing(tmp_path: Path) -> None:
    _, merged = away(tmp_path, 10)
    assert STEPS + 30 <= merged / (4 * LEARNERS) <= STEPS + 30 + 2


def test_a_learner_that_pauses_takes_no_step_beyond_its_bound(tmp_path: Path) -> None:
    world, merged = away(tmp_path, 0, alone="pause", alone_steps=10)
    assert STEPS <= merged / (4 * LEARNERS) <= STEPS + 2 and world.now > (STEPS + 20) * STEP_S


def test_a_drift_is_shrunk_or_given_up_and_counts_for_all_its_steps(tmp_path: Path) -> None:
    ways = ("merge", "shrink", "forward")
    done = [away(tmp_path / way, 10, alone=way, alone_steps=10) for way in ways]
    assert len({merged for _, merged in done}) == 1
    assert not any(torch.equal(a.master(), b.master()) for (a, _), (b, _) in itertools.combinations(done, 2))


# ---------------------------------------------------------------------------------------------- it is extended


def test_an_extended_run_is_as_long_as_ordered_and_its_learners_rates_go_back_up(tmp_path: Path) -> None:
    rates: list[tuple[bool, float]] = []
    job = job_of({"run.steps": STEPS // 2}, extend_at=0.5, extend_by=2.0)
    world = lived(job, tmp_path, lambda world: rates.append((world.is_extended, world.islands[0].rate)))
    assert STEPS <= sum(steps_by_learner(world)) / LEARNERS <= STEPS + 2
    before, after = ([rate for is_extended, rate in rates if is_extended == when] for when in (False, True))
    assert max(after[2:]) > before[-1], "it had begun to fall"
    orders = [fact for fact in facts_of(tmp_path / "run") if isinstance(fact, Ordered)]
    assert [(fact.verb, fact.by) for fact in orders] == [("extend", "the laboratory")]
