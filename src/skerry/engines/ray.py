"""The engine for a Ray cluster that people have already: every process of a run under an actor that Ray brings back.

The syncer and each learner are detached actors with names (`mine-syncer`, `mine-gpu-0`), in the namespace `skerry`, so
that they stay when this command has ended. Ray decides where they are by what an island says it needs; what needs more
than is free waits, and is what an autoscaler sees. A learner of several machines is one actor on each, in a placement
group of its own. What the actors do stands in `ray_member.py`; this side creates, asks and removes them.

`where` is the name of a Ray resource: one that its operators gave to machines ("spot"), or "node:ADDRESS", which every
machine has by itself. The syncer is where its run directory is: without a `where`, the machine that launches.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from skerry.engines import Member, NotAsked, is_member, lines_of, spec
from skerry.engines import folder as folders
from skerry.engines.command import learner_argv, meeting, syncer_argv
from skerry.engines.folder import Record
from skerry.engines.ray_member import (
    CLOSED,
    NAMESPACE,
    SYNCER,
    SYNCER_LEAVE_S,
    Ends,
    LearnerMember,
    Order,
    SyncerMember,
    actor_name,
    actor_of,
    leave_s,
    probe,
    read_ends,
    release,
)
from skerry.engines.spec import Island, Launch
from skerry.errors import Refusal, RunFailed, one_line
from skerry.text import near

A_LITTLE = 0.001  # of a resource that says where, so that it is never used up
GIB = 1 << 30
START_S = 180.0  # for the syncer to answer: where nothing is compiled yet it takes a while
PROBE_S = 60.0  # for a machine to say whether the syncer can be there
KNOCK_S = 5.0
ASK_S = 4.0  # for the members that are up to say how they are
FOLLOW_S = 0.5
POLL_S = 0.2
UNITS = {"CPU": "CPU", "GPU": "GPU", "memory": "GiB of memory"}


def problems(launch: Launch) -> Iterator[str]:
    _connect(launch.ray.address)
    machines = _machines()
    if actor_of(launch.name, SYNCER) is not None:
        yield f"run.name = {launch.name!r}: is up on this cluster already: skerry down ends it, or choose another name"
    if launch.syncer.dir and not Path(launch.syncer.dir).is_absolute():
        yield f"syncer.dir = {launch.syncer.dir!r}: give it from the root (/…), as the syncer's machine sees it"
    for island in launch.islands:
        gpus = island.gpus * island.workers
        if gpus > 1 and gpus % 1:
            yield f"island {island.name}: {gpus:g} GPUs on a machine: Ray gives parts of one, or whole ones"
        if not launch.ray.autoscales:
            yield from (f"island {island.name}: {lack}" for lack in _lacks(_needs(island), machines, island.machines))
    if not launch.ray.autoscales:
        yield from (f"syncer: {lack}" for lack in _lacks(_syncer_needs(launch, ""), machines, 1))


def start(launch: Launch, folder: Path) -> None:
    _connect(launch.ray.address)
    _check_folder(folder)
    record = folders.record_of(launch, "ray", folder, id=secrets.token_hex(4))
    where = _syncer_where(launch)
    run_dir = launch.syncer.dir or record.folder
    port = _probed(launch, run_dir, where)
    record.handle |= {"address": _address(), "run_dir": run_dir, "port": str(port), "where": where}
    record.handle |= {"working_dir": _working_dir(), "folder": _carried(launch)}
    folders.write(record)
    try:
        _create_syncer(launch, record)
        for island in sorted(launch.islands, key=_size, reverse=True):
            for index in range(record.counts[island.name]):
                _create_learner(island, index, record)
        _wait_for_syncer(launch, record)
    except BaseException:
        with contextlib.suppress(Refusal):
            down(record)
        raise


def dry(launch: Launch, folder: Path) -> str:
    """One line an actor: its name, what it asks Ray for, and the command that it runs."""
    run_dir = launch.syncer.dir or str(folder.absolute())
    argv = syncer_argv(
        launch, "python", run_dir, str(launch.file), launch.syncer.genesis, "0.0.0.0", launch.syncer.port
    )  # fmt: skip
    lines = [_dry_line(launch, SYNCER, _syncer_needs(launch, "node:(this machine)"), argv)]
    for island in launch.islands:
        for index in range(island.count):
            for machine in range(island.machines):
                name = island.learner(index) + (f".{machine}" if machine else "")
                several = island.machines > 1
                met = meeting(island.machines, str(machine), "MACHINE_0", "A_FREE_PORT") if several else []
                lines.append(_dry_line(launch, name, _needs(island), learner_argv(island, "python", met, index)))
    return "\n".join(lines)


def members(record: Record) -> list[Member]:
    names = [(SYNCER, ""), *((name, name.rpartition("-")[0]) for name in _learners(record))]
    ends = read_ends(Path(record.handle["run_dir"])) or Ends()
    try:
        _connect(record.handle["address"])
    except Refusal:
        gone = f"no Ray cluster answers at {record.handle['address']}: what it had is gone with it"
        return [ends.ended.get(name) or Member(name, island, "ended", detail=gone) for name, island in names]
    return _looked(record, names, ends)


def logs(record: Record, name: str, follow: bool) -> Iterator[str]:
    known = [SYNCER, *_learners(record)]
    learner, dot, machine = name.partition(".")
    is_named = is_member(learner, record.counts) and (not dot or (machine.isascii() and machine.isdecimal()))
    if not is_named or (learner not in known and not (_kept(record) / f"{name}.log").exists()):
        raise Refusal(f"no member {name!r} in this run: {near(name, known)}")
    with contextlib.suppress(Refusal):  # the cluster may be gone, and what was kept is not
        _connect(record.handle["address"])
        if actor_of(record.name, *_part(name)) is not None:
            yield from lines_of(_parts_said(record, name, follow))
            return
    kept = _kept(record) / f"{name}.log"
    if not kept.exists():
        raise Refusal(f"{name}: has ended, and its last words are in {kept} on the syncer's machine: look there")
    yield from kept.read_text("utf-8", "replace").splitlines()


def scale(record: Record, island: str, count: int) -> None:
    _connect(record.handle["address"])
    if (syncer := actor_of(record.name, SYNCER)) is None:
        raise Refusal(f"{record.folder}: is not up: skerry launch it again first")
    launch = _launch(record)
    before = record.counts[island]
    record.counts[island] = count
    folders.write(record)
    for index in range(before, count):
        _answer(syncer.takes_part.remote(f"{island}-{index}"), ASK_S)
        _create_learner(launch.island(island), index, record)
    going = [f"{island}-{index}" for index in reversed(range(count, before))]
    release(record.name, going, leave_s(launch, launch.island(island)))


def down(record: Record) -> None:
    _connect(record.handle["address"])
    launch = _launch(record)
    release(record.name, _learners(record), max(leave_s(launch, island) for island in launch.islands))
    release(record.name, [SYNCER], SYNCER_LEAVE_S + ASK_S)


# ---------------------------------------------------------------------------------------------- the cluster


def _connect(address: str) -> None:
    """To the cluster at this address; empty: what RAY_ADDRESS says, or the one that runs on this machine."""
    import ray

    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS", "")
    try:
        _knock(address)
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        sys.stdout = _Ours(sys.stdout)
    except (OSError, RuntimeError, ValueError) as error:
        which = f"at {address}" if address else "on this machine"
        why = one_line(str(error).strip().partition("\n")[0])
        raise NotAsked(
            f"no Ray cluster answers {which} ({why}): ray start --head begins one, ray.address names one"
        ) from None


def _knock(address: str) -> None:
    """Ray tries for minutes to reach a cluster where nobody answers."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:  # else it is a word of Ray's own
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()


class _Ours:
    """Stdout for this thread alone: Ray writes there what it hears of the cluster, from a thread of its own.

    That goes to stderr, for what a command prints is read by programs.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        stream = self._stream if threading.get_ident() == self._thread else sys.stderr
        return int(stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _machines() -> list[Mapping[str, float]]:
    """What each has in all, whatever of it is in use."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _needs(island: Island) -> dict[str, float]:
    """Of one learner on one machine."""
    return _asked_for(island.cpus, island.gpus, island.memory_gib, island.where, island.workers)


def _size(island: Island) -> tuple[float, float]:
    """Those that need more of a machine are placed first: spread ones of the others would leave no machine free."""
    return island.gpus * island.workers, island.cpus * island.workers


def _syncer_needs(launch: Launch, where: str) -> dict[str, float]:
    return _asked_for(launch.syncer.cpus, 0.0, launch.syncer.memory_gib, launch.syncer.where or where, 1)


def _asked_for(cpus: float, gpus: float, memory_gib: float, where: str, times: int) -> dict[str, float]:
    """As Ray counts it."""
    needs = {"CPU": cpus * times, "GPU": gpus * times, "memory": memory_gib * times * GIB}
    return {name: amount for name, amount in needs.items() if amount} | ({where: A_LITTLE} if where else {})


def _lacks(needs: Mapping[str, float], machines: list[Mapping[str, float]], count: int) -> Iterator[str]:
    """What of it no machine of the cluster has, ever."""
    advice = "ask for less, or say ray.autoscales = true if the cluster brings machines when they are asked for"
    for name, amount in needs.items():
        largest = max((machine.get(name, 0.0) for machine in machines), default=0.0)
        if amount > largest and name in UNITS:
            yield f"{_amount(name, amount)} on one machine, the largest has {_number(name, largest)}: {advice}"
        elif amount > largest:
            named = sorted({key for machine in machines for key in machine} - set(UNITS) - {"object_store_memory"})
            yield f"where = {name!r}: no machine of the cluster has this resource: {near(name, named)}"
    fitting = [machine for machine in machines if all(machine.get(name, 0.0) >= needs[name] for name in needs)]
    if len(fitting) < count:
        asked = ", ".join(_amount(name, amount) for name, amount in needs.items() if name in UNITS)
        yield f"{count} machines with {asked}, the cluster has {len(fitting)} such: {advice}"


def _amount(name: str, amount: float) -> str:
    unit = UNITS.get(name, name)
    return f"{_number(name, amount)} {unit}" + ("s" if name in ("CPU", "GPU") and amount != 1 else "")


def _number(name: str, amount: float) -> str:
    return f"{amount / GIB:.3g}" if name == "memory" else f"{amount:g}"


def _working_dir() -> str:
    """What `ray job submit --working-dir` took along, as Ray names it; empty outside of such a job."""
    import ray

    return str(ray.get_runtime_context().runtime_env.get("working_dir") or "")


def _carried_root(path: Path) -> Path | None:
    """Where the job's files lie on this machine, if `path` is among them."""
    name = Path(_working_dir()).stem
    return next((above for above in path.absolute().parents if name and above.name == name), None)


def _carried(launch: Launch) -> str:
    """The folder of the launched file as other machines see it: the same path, or below the job's files."""
    root, above = _carried_root(launch.file), launch.file.absolute().parent
    return str(above.relative_to(root)) if root else str(above)


def _check_folder(folder: Path) -> None:
    if _carried_root(folder / folders.LAUNCHED) is not None:
        raise Refusal(f"--run {folder}: is removed with this job: give a folder from the root (/…) that stays")


# ---------------------------------------------------------------------------------------------- actors


def _order(record: Record, **more: Any) -> bytes:
    return msgspec.json.encode(
        Order(
            id=record.handle["id"],
            text=record.text,
            overrides=record.overrides,
            folder=record.handle["folder"],
            run_dir=record.handle["run_dir"],
            port=int(record.handle["port"]),
            **more,
        )
    )


def _options(record: Record, name: str, needs: Mapping[str, float], machine: int = 0) -> dict[str, Any]:
    options: dict[str, Any] = {
        "name": actor_name(record.name, name, machine),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        **_as_options(needs),
    }
    if record.handle["working_dir"]:
        options["runtime_env"] = {"working_dir": record.handle["working_dir"]}
    return options


def _as_options(needs: Mapping[str, float]) -> dict[str, Any]:
    own = {name: amount for name, amount in needs.items() if name not in UNITS}
    options = {"num_cpus": needs.get("CPU", 0.0), "num_gpus": needs.get("GPU", 0.0), "resources": own}
    return options | ({"memory": int(needs["memory"])} if "memory" in needs else {})


def _create_syncer(launch: Launch, record: Record) -> None:
    import ray

    learners = _learners(record)
    options = _options(record, SYNCER, _syncer_needs(launch, record.handle["where"]))
    ray.remote(SyncerMember).options(**options).remote(_order(record, learners=learners))


def _create_learner(island: Island, index: int, record: Record) -> None:
    """One actor, or one on each of its machines, in a group that no two of them share a machine in."""
    import ray
    from ray.util import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    name, needs = island.learner(index), _needs(island)
    group = None
    if island.machines > 1:
        group = placement_group(
            [dict(needs)] * island.machines, "STRICT_SPREAD", actor_name(record.name, name), "detached"
        )  # fmt: skip
    for machine in range(island.machines):
        options = _options(record, name, needs, machine)
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, machine)
        else:
            options["scheduling_strategy"] = "SPREAD"  # Ray's own way fills one machine first, and all would go with it
        order = _order(record, island=island.name, index=index, machine=machine)
        ray.remote(LearnerMember).options(**options).remote(order)


def _syncer_where(launch: Launch) -> str:
    import ray

    return launch.syncer.where or f"node:{ray.util.get_node_ip_address()}"


def _probed(launch: Launch, run_dir: str, where: str) -> int:
    """The syncer's port, once that machine has said that it can write there."""
    import ray

    genesis = ""
    if launch.syncer.genesis:
        path = launch.path(launch.syncer.genesis).absolute()
        root = _carried_root(path)
        genesis = str(path.relative_to(root)) if root else str(path)
    task = ray.remote(probe).options(num_cpus=0, resources={where: A_LITTLE}, max_retries=1)
    try:
        trouble, port = ray.get(task.remote(run_dir, genesis, launch.syncer.port), timeout=PROBE_S)
    except ray.exceptions.GetTimeoutError:
        raise Refusal(
            f"syncer: no machine with {where!r} answered within {PROBE_S:.0f} s: name another as syncer.where"
        ) from None
    if trouble.startswith(CLOSED):
        raise Refusal(f"{run_dir}: {trouble}")
    if trouble:
        raise Refusal(
            f"syncer: {trouble}: give syncer.dir and syncer.genesis as that machine sees them, or syncer.where"
        )
    return int(port)


def _wait_for_syncer(launch: Launch, record: Record) -> None:
    deadline = time.monotonic() + START_S
    member = Member(SYNCER, "", "waiting")
    while time.monotonic() < deadline:
        syncer = actor_of(record.name, SYNCER)
        if syncer is not None and (answer := _answer(syncer.status.remote(), ASK_S)) is not None:
            member = Member(*answer)
        if member.state == "running" or syncer is None:  # a resumed run may be closed already
            return
        if member.restarts:
            raise RunFailed(f"the syncer did not begin: {member.detail}")
        time.sleep(POLL_S)
    raise RunFailed(
        f"the syncer did not answer within {START_S:.0f} s ({member.state}): skerry logs {record.folder} syncer"
    )


def _learners(record: Record) -> list[str]:
    return [f"{island}-{n}" for island, count in record.counts.items() for n in range(count)]


def _launch(record: Record) -> Launch:
    return spec.again(record.text, Path(record.file), record.overrides)


# ---------------------------------------------------------------------------------------------- looking at it


def _answer(reference: Any, timeout_s: float) -> Any | None:
    import ray

    try:
        return ray.get(reference, timeout=timeout_s)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
        return None


def _looked(record: Record, names: list[tuple[str, str]], ends: Ends) -> list[Member]:
    """All are asked at once: who waits for a machine does not answer, nor does who is on its way back."""
    import ray

    actors = {name: actor for name, _ in names if (actor := actor_of(record.name, name)) is not None}
    asked = {name: actor.status.remote() for name, actor in actors.items()}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ASK_S)
    found = []
    for name, island in names:
        if name not in asked:
            found.append(ends.ended.get(name) or Member(name, island, "ended"))
        elif (answer := _answer(asked[name], POLL_S)) is not None:
            found.append(Member(*answer))
        else:
            found.append(Member(name, island, "waiting", detail=_why_waiting(record, island)))
    return found


def _why_waiting(record: Record, island: str) -> str:
    launch = _launch(record)
    needs = _needs(launch.island(island)) if island else _syncer_needs(launch, record.handle["where"])
    asked = ", ".join(_amount(name, amount) for name, amount in needs.items() if amount != A_LITTLE)
    place = "".join(f" of {name!r}" for name, amount in needs.items() if amount == A_LITTLE)
    lacks = list(_lacks(needs, _machines(), launch.island(island).machines if island else 1))
    return f"no machine{place} has {asked}" if lacks else f"no machine{place} has {asked} free, or it is on its way"


def _kept(record: Record) -> Path:
    """Where last words are; this machine may not see it."""
    return Path(record.handle["run_dir"]) / "logs"


def _part(name: str) -> tuple[str, int]:
    """gpu-0.1 is what the second machine of gpu-0 has."""
    learner, _, machine = name.partition(".")
    return learner, int(machine) if machine.isdecimal() else 0


def _parts_said(record: Record, name: str, follow: bool) -> Iterator[bytes]:
    """What the member hands out of its log, and who has moved to another machine begins a log there."""
    where, offset = "", 0
    while (actor := actor_of(record.name, *_part(name))) is not None:
        answer = _answer(actor.read.remote(offset), ASK_S)
        if answer is None:
            if not follow:
                raise Refusal(
                    f"{name}: does not answer, it waits for a machine or is on its way back: skerry ps says which"
                )
            continue
        there, size, part = answer
        if where and (there != where or size < offset):
            yield f"\n{name} is on {there} now; what it said on {where} stayed there\n".encode()
            where, offset = there, 0
            continue
        where, offset = there, offset + len(part)
        yield part
        if not part and not follow:
            return
        if not part:
            time.sleep(FOLLOW_S)


def _dry_line(launch: Launch, name: str, needs: Mapping[str, float], argv: list[str]) -> str:
    asked = json.dumps({key: value for key, value in needs.items() if value})
    return f"actor {actor_name(launch.name, name)} {asked} {' '.join(argv)}"
