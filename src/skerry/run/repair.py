"""What is damaged in a run's directory, and the ways out.

A file that can be had again is written anew, with the same contents under the same name, and nobody need hear of it. A
fragment whose newest version cannot be had from checkpoints and journal has three ways out: exactly, from an earlier
version and the recorded contributions; the published values from a learner that holds them, without velocity and
residual; or a new version with the values of the newest that can be had. Rules that hold here: values are believed only
if they have the digest on the tape; versions never go back; damage to what the run does not need to go on is said, and
stops nothing; where it would stop every backup, it is left behind. What a function returns is a fact to commit; its
file is put already.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from skerry import config as configs
from skerry.algo.fragments import Fragment, decode_layout
from skerry.core.facts import Committed, Restored, SteppedBack
from skerry.core.state import Checkpoint, FragmentState, Redo, RunState
from skerry.errors import FileDamaged, ModelError, TapeDamaged
from skerry.node import versions
from skerry.node.algebra import FLOAT32, Payload, Values
from skerry.run.facts import facts_of, fragments_of, history_of
from skerry.run.genesis import FIXED, GENESIS, open_genesis
from skerry.run.outputs import ways_out as fixed_ways_out
from skerry.run.replay import Different, held_of
from skerry.store.journal import Place
from skerry.store.store import RECORD, Store

CHECKPOINT = "checkpoint"  # a file that is neither the start's nor a kept version's
SAID_MAX = 10  # lines about lost contributions: all of them may be

log = logging.getLogger("skerry.syncer")


class Damage(NamedTuple):
    """A fragment of which something is lost: its newest version cannot be had, or what it does not need; and why."""

    fragment: Fragment
    at: FragmentState
    what: str

    def __str__(self) -> str:
        return f"fragment {self.fragment.index} version {self.at.version}"


def damaged(store: Store, state: RunState) -> list[Damage]:
    """Every fragment that the run cannot go on from."""
    found = []
    for fragment, at in zip(fragments_of(state.created), state.fragments, strict=True):
        try:
            versions.load(store, fragment, at)
        except FileDamaged as error:
            found.append(Damage(fragment, at, str(error)))
    return found


def explain(
    store: Store, state: RunState, damage: Sequence[Damage], tried: str = "", genesis: Path | None = None
) -> str:
    """Why the run cannot go on, and how it can: one line, without what was `tried`.

    `genesis` is a file that was named and may have the run's first values; else the run's own is looked for.
    """
    first, more = damage[0], f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
    ways = ways_out(store, state, first, tried, genesis)
    return f"{first}{more}: {first.what}" + "".join(f", or {way}" for way in ways)


def ways_out(store: Store, state: RunState, damage: Damage, tried: str, genesis: Path | None = None) -> list[str]:
    """What can be done about it besides restoring a copy, each as a command and what it does; not what was `tried`."""
    serve, ways = f"skerry syncer --run {store.root}" + (f" --genesis {genesis}" if genesis else ""), []
    reached = reach(store, state, damage.fragment, damage.at.version, genesis or store.root / GENESIS)
    is_exact = reached is not None and reached.version == damage.at.version
    if tried != "same" and (is_exact or can_be_lent(damage)):
        ways.append(f"{serve} --repair (the same version, {'from records' if is_exact else 'from a learner'})")
    if tried != "previous" and reached is not None and not is_exact:
        ways.append(f"{serve} --repair previous (this fragment from version {reached.version})")
    if reached is None and (kept := _kept_whole(store, state, damage.fragment)) is not None:
        if state.phase in ("closing", "closed"):
            ways.append(f"skerry export {store.root} --version {kept} (the model of a kept version)")
        else:
            ways.append(f"skerry rollback {store.root} --to {kept} (all fragments from a kept version)")
    return ways


def _kept_whole(store: Store, state: RunState, fragment: Fragment) -> int | None:
    """The newest kept version whose file of this fragment is whole."""
    kept = [state.start, *state.kept]
    return next((v.number for v in reversed(kept) if _is_whole(store, fragment, v.checkpoints[fragment.index])), None)


# ---------------------------------------------------------------------------------------------- files, as they were


class Found(NamedTuple):
    """How much was damaged, and of which fragments the way to the newest version that is left to be mended."""

    damaged: int
    broken: list[Damage]


def mend_files(store: Store, state: RunState, genesis: Path | None = None) -> Found:
    """Look at every file that the run keeps, write those anew that can be had again, and name the others.

    `genesis` is a file that may have the run's first values.
    """
    count = _look_at_tape(store) + _look_at_fixed(store, state, genesis)
    count += _look_at_buffers(store, state) + _look_at_record(store)
    broken = list[Damage]()
    for fragment in fragments_of(state.created):
        flaws, left = _look_at_checkpoints(store, state, fragment, genesis)
        rotten = _look_at_journal(store, state, fragment)
        count += flaws + len(rotten)
        if ways := left + rotten:
            broken.append(Damage(fragment, state.fragments[fragment.index], ways[0]))
    return Found(count, broken)


def _look_at_checkpoints(
    store: Store, state: RunState, fragment: Fragment, genesis: Path | None
) -> tuple[int, list[str]]:
    """How many whole versions are damaged; and what is wrong with those left so that lead to the newest alone."""
    count, left = 0, list[str]()
    for checkpoint in _files(state, fragment):
        if flaw := _flaw(store, fragment, checkpoint):
            count += 1
            if not _mended(store, state, fragment, checkpoint, genesis):
                role = _role(state, checkpoint)
                log.warning("repair: %s, fragment %d: %s", role, fragment.index, flaw)
                left += [flaw] if role == CHECKPOINT else []
    return count, left


def _look_at_journal(store: Store, state: RunState, fragment: Fragment) -> list[str]:
    """What is wrong with its entries."""
    found = []
    for redo in state.fragments[fragment.index].redo:
        try:
            store.entry(Place(*redo.entry))
        except FileDamaged as error:
            found.append(str(error))
            log.warning("repair: journal, fragment %d version %d: %s", fragment.index, redo.version, error)
    return found


def _look_at_record(store: Store) -> int:
    """How many recorded contributions are damaged: nobody has them, and nothing but replay and repair reads them."""
    count, cost = 0, "nobody else has it; the run goes on without it, a replay that comes to it stops"
    for fact in _recorded(store):
        try:
            store.get(fact.result.payloads, RECORD)
        except FileDamaged as error:
            count += 1
            if count <= SAID_MAX:
                at = fact.decision
                log.warning("repair: record, fragment %d version %d: %s, %s", at.fragment, at.version, error, cost)
    if count > SAID_MAX:
        log.warning("repair: record: so are %d more of the recorded contributions", count - SAID_MAX)
    return count


def _recorded(store: Store) -> Iterator[Committed]:
    """Merges whose contributions were recorded, as far as the tape can be read."""
    with contextlib.suppress(TapeDamaged):
        for _, fact in facts_of(store):
            if isinstance(fact, Committed) and fact.result.payloads:
                yield fact


def _look_at_tape(store: Store) -> int:
    """1 if an earlier segment is damaged: the run goes on from the last, which was read already."""
    try:
        for _ in history_of(store):
            pass
    except TapeDamaged as error:
        log.warning("repair: tape: %s; the run goes on without it, replay cannot", error)
        return 1
    return 0


def _look_at_fixed(store: Store, state: RunState, genesis: Path | None) -> int:
    """1 if what is not trained is damaged: the run goes on without it, but its model cannot be exported whole."""
    path, sha256 = store.root / FIXED, state.created.fixed
    if not sha256 or _sha256(path) == sha256:
        return 0
    if genesis is not None and genesis.exists():
        anew = path.with_name(f"{FIXED}.anew")
        with contextlib.suppress(ModelError):
            is_same = open_genesis(genesis)[1].keep_fixed(anew)[1] == sha256
            anew.replace(path) if is_same else anew.unlink(missing_ok=True)
            if is_same:
                return 1
    log.warning("repair: what is not trained: %s is damaged or missing: %s", path, fixed_ways_out(store.root))
    return 1


def _look_at_buffers(store: Store, state: RunState) -> int:
    """How many learners' buffers are damaged: the run goes on, and an export, without them."""
    count = 0
    for given in state.buffers.values():
        try:
            store.get(given.file)
        except FileDamaged as error:
            count += 1
            log.warning("repair: the buffers of %s: %s", given.learner, error)
    return count


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _role(state: RunState, checkpoint: Checkpoint) -> str:
    """What a file is for."""
    kept = [version.number for version in state.kept if checkpoint in version.checkpoints]
    return f"kept version {kept[0]}" if kept else "the start" if checkpoint.file in state.created.files else CHECKPOINT


def _files(state: RunState, fragment: Fragment) -> list[Checkpoint]:
    """Every whole version of the fragment that the run keeps, the earliest first."""
    kept = [version.checkpoints[fragment.index] for version in [state.start, *state.kept]]
    found = {c.file: c for c in [*kept, *state.fragments[fragment.index].checkpoints]}
    return sorted(found.values(), key=lambda c: c.version)


def _flaw(store: Store, fragment: Fragment, checkpoint: Checkpoint) -> str:
    """What is wrong with its file; empty if nothing is."""
    try:
        versions.whole(store, fragment, checkpoint)
    except FileDamaged as error:
        return str(error)
    return ""


def _is_whole(store: Store, fragment: Fragment, checkpoint: Checkpoint) -> bool:
    return not _flaw(store, fragment, checkpoint)


def _mended(store: Store, state: RunState, fragment: Fragment, checkpoint: Checkpoint, genesis: Path | None) -> bool:
    at = state.fragments[fragment.index]
    if checkpoint in at.checkpoints and versions.mend(store, fragment, at, checkpoint):
        return True
    if checkpoint.file == state.created.files[fragment.index]:
        values = _first_values(state, fragment, genesis)
    else:
        reached = reach(store, state, fragment, checkpoint.version)
        values = reached.values if reached is not None and reached.version == checkpoint.version else None
    return values is not None and versions.rewrite(store, fragment, checkpoint, values)


def _first_values(state: RunState, fragment: Fragment, genesis: Path | None) -> Values | None:
    """As this file has them, if it is of the same model; whether they are the same its digest will say.

    No more of it is read than this fragment's, for there may be many fragments, and it may be large.
    """
    if genesis is None or not genesis.exists():
        return None
    try:
        layout, values = open_genesis(genesis)
        if layout.digest != decode_layout(state.created.layout).digest:
            return None
        theta = values.fragment(fragment)
    except ModelError as error:
        log.warning("repair: %s", error)
        return None
    zero = np.zeros_like(theta)
    return Values(theta, zero, zero)


def _start(state: RunState, fragment: Fragment, genesis: Path | None) -> Values | None:
    """The fragment's first values, if this file has the very same."""
    values = _first_values(state, fragment, genesis)
    is_same = values is not None and FLOAT32.state_digest(values) == state.created.states[fragment.index]
    return values if is_same else None


# ---------------------------------------------------------------------------------------------- exactly


class Reached(NamedTuple):
    """The newest version that can be had, of which version the file is that leads there, and why no later one can."""

    version: int
    values: Values
    base: int
    why: str = ""


class _Step(NamedTuple):
    """How a version came about, by the tape or its fold, and the digest of its state as it was last."""

    made: Committed | Redo | SteppedBack
    state: bytes


def reach(
    store: Store, state: RunState, fragment: Fragment, wanted: int, genesis: Path | None = None
) -> Reached | None:
    """The wanted version, or the newest before it that can be had, from a whole file and the merges since.

    The file may be a checkpoint, of a kept version, of the start, or `genesis`. None if no whole file leads there.
    """
    bases = {c.version: c for c in _files(state, fragment) if _is_whole(store, fragment, c)}
    first = None if 0 in bases else _start(state, fragment, genesis)
    steps = _steps_of(store, state, fragment.index)
    way = _way(steps, {*bases, 0} if first else set(bases), wanted)
    if way is None:
        return None
    base = way[0]
    values = versions.whole(store, fragment, bases[base]) if base in bases else first
    assert values is not None
    reached = Reached(base, _as_last(values, steps.get(base)), base)
    threads = configs.decode(state.config).merge.threads
    for version in way[1:]:
        try:
            values = _stepped(store, fragment, reached.values, steps[version], threads)
        except (FileDamaged, Different) as error:
            return reached._replace(why=f"version {version}: {error}")
        reached = Reached(version, values, base)
    return reached


def _steps_of(store: Store, state: RunState, p: int) -> dict[int, _Step]:
    """By version: those that can be done again from the journal, and all that the tape tells of."""
    steps = {redo.version: _Step(redo, redo.state) for redo in state.fragments[p].redo}
    with contextlib.suppress(TapeDamaged):
        for _, fact in facts_of(store):
            match fact:
                case Committed() if fact.decision.fragment == p:
                    steps[fact.decision.version] = _Step(fact, fact.result.state)
                case SteppedBack() if fact.fragment == p:
                    steps[fact.version] = _Step(fact, fact.state)
                case Restored() if fact.fragment == p and fact.version in steps:
                    steps[fact.version] = steps[fact.version]._replace(state=fact.state)
    return steps


def _way(steps: Mapping[int, _Step], bases: Collection[int], wanted: int) -> list[int] | None:
    """The versions that lead to the wanted one, from the newest of `bases` on; None if none of them does."""
    way = [wanted]
    while way[-1] not in bases:
        if way[-1] not in steps:
            return None
        made = steps[way[-1]].made
        way.append(made.to if isinstance(made, SteppedBack) else way[-1] - 1)
    return way[::-1]


def _stepped(store: Store, fragment: Fragment, values: Values, step: _Step, threads: int) -> Values:
    """The next version, as the tape has it."""
    if isinstance(step.made, SteppedBack):
        return values
    outer, result = (step.made, step.made) if isinstance(step.made, Redo) else (step.made.decision, step.made.result)
    merged = FLOAT32.advance(outer, fragment, values, _delta(store, fragment, step.made, threads), threads)
    if merged.state != result.state:
        raise Different("what was recorded gives something else")
    return _as_last(merged.values, step)


def _delta(store: Store, fragment: Fragment, made: Committed | Redo, threads: int) -> Payload:
    """The merged delta: from the journal, or merged again from the recorded contributions."""
    entry = made.entry if isinstance(made, Redo) else made.result.entry
    try:
        return store.entry(Place(*entry))
    except FileDamaged:
        if isinstance(made, Redo):
            raise Different("the tape does not tell of its merge any more") from None
        if not made.result.payloads:
            raise Different("its contributions were not recorded") from None
    held = [one for _, one in held_of(store, made, fragment)]
    return FLOAT32.merge(made.decision, fragment, held, threads)


def _as_last(values: Values, step: _Step | None) -> Values:
    """Without velocity and residual where they were lost since, in a copy that a learner lent."""
    if step is None or FLOAT32.state_digest(values) == step.state:
        return values
    zero = np.zeros_like(values.theta)
    return Values(values.theta, zero, zero)


def remake(store: Store, state: RunState, damage: Damage) -> Restored | None:
    """The very same version, done again from what is left; None if that is not enough."""
    reached = reach(store, state, damage.fragment, damage.at.version)
    if reached is None or reached.version < damage.at.version:
        log.warning("%s cannot be merged again: %s", damage, reached.why if reached else "no whole file leads to it")
        return None
    if FLOAT32.state_digest(reached.values) != damage.at.state:
        log.warning("%s: doing its merges again gives something else", damage)
        return None
    source = f"version {reached.base} and the recorded merges since"
    return _restored(store, damage, reached.values, source if reached.base < reached.version else "its whole file")


def _restored(store: Store, damage: Damage, values: Values, source: str) -> Restored:
    return Restored(
        fragment=damage.fragment.index,
        version=damage.at.version,
        file=store.put(FLOAT32.parts(values)),
        digest=damage.at.digest,
        state=FLOAT32.state_digest(values),
        theta=FLOAT32.sha256(values.theta),
        source=source,
    )


# ---------------------------------------------------------------------------------------------- from a learner


def can_be_lent(damage: Damage) -> bool:
    """Whether the tape has a sha256 of the very version: a learner need not be believed then."""
    return _sha256_of(damage) is not None


def take_copy(store: Store, damage: Damage, learner: str, payload: memoryview) -> Restored | None:
    """A file around a learner's copy of the published values; None if they are not what the tape says."""
    theta = FLOAT32.decode("fp32", payload)
    if FLOAT32.sha256(theta) != _sha256_of(damage) or FLOAT32.digest(theta) != damage.at.digest:
        return None
    zero = np.zeros_like(theta)
    source = f"{learner}; velocity and residual lost" if damage.at.version else learner  # a genesis has neither
    return _restored(store, damage, Values(theta, zero, zero), source)


def _sha256_of(damage: Damage) -> bytes | None:
    return next((c.theta for c in damage.at.checkpoints if c.version == damage.at.version), None)


# ---------------------------------------------------------------------------------------------- the version before


def step_back(store: Store, state: RunState, damage: Damage) -> SteppedBack:
    """A new version with the values of the newest that can be had: what was merged since is lost."""
    reached = reach(store, state, damage.fragment, damage.at.version)
    if reached is None:
        raise FileDamaged(f"no earlier version can be had: {explain(store, state, [damage], tried='previous')}")
    return back_to(store, state, damage.fragment, reached.version, reached.values)


def back_to(store: Store, state: RunState, fragment: Fragment, to: int, values: Values) -> SteppedBack:
    """A new version of a fragment with the values of an earlier one."""
    at = state.fragments[fragment.index]
    return SteppedBack(
        epoch=state.epoch,
        fragment=fragment.index,
        version=at.version + 1,
        parent=at.digest,
        to=to,
        file=store.put(FLOAT32.parts(values)),
        digest=FLOAT32.digest(values.theta),
        state=FLOAT32.state_digest(values),
        theta=FLOAT32.sha256(values.theta),
    )
