"""The engine Kubernetes: plain manifests, which the user applies; kubectl looks at what they began, scales and ends it.

    RUN/kubernetes/10-secrets.yaml   the launched file, the syncer's keys, a key for each learner, what `env` says
    RUN/kubernetes/20-syncer.yaml    who may dial whom, and the syncer's Service, PodDisruptionBudget and StatefulSet
    RUN/kubernetes/30-ISLAND.yaml    the Jobs of an island

What is in them, and why, is in `manifests.py`.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from skerry.engines import Member, State, manifests, spec
from skerry.engines import folder as folders
from skerry.engines.folder import Record
from skerry.engines.manifests import (
    FILE,
    INDEX_NOTE,
    ISLAND_LABEL,
    LAUNCH_LABEL,
    PAGE_PORT,
    RUN_DIR,
    SYNCER_GRACE_S,
    Manifest,
)
from skerry.engines.spec import Island, Launch
from skerry.errors import Refusal, one_line
from skerry.run.keys import BOOK
from skerry.store.files import contents, fresh, put_in_place
from skerry.text import counted, near

MANIFESTS = "kubernetes"  # below the folder of a launch
LEAVING_S = 5.0  # that a learner needs beyond learner.leave_timeout_s
LEARNERS_MAX = 400  # of an island: their keys are one Secret, which may have 1 MiB
NAME_CHARS_MAX = 52  # of a Job, so that its pods' names have room for an index
KUBECTL_S = 60.0  # for one that only asks


# ------------------------------------------------------------------------------------------------- before it begins


def problems(launch: Launch) -> Iterator[str]:
    """Whether the cluster has the resources only the cluster knows: what does not fit waits there, and ps says why."""
    table = launch.kubernetes
    if not launch.name[0].isalpha():
        yield f"run.name = {launch.name!r}: Kubernetes wants a letter at its beginning, for it names a Service"
    if launch.syncer.dir:
        yield f"syncer.dir: on Kubernetes the run directory is {RUN_DIR} on a volume of its own: leave it out"
    if launch.syncer.genesis and not launch.syncer.genesis.startswith("/"):
        yield (
            f"syncer.genesis = {launch.syncer.genesis!r}: on Kubernetes it is a path in the learners' image: copy the "
            "file into that, and give its path from the root"
        )
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", table.namespace):
        yield f"kubernetes.namespace = {table.namespace!r}: use 1 to 63 of a-z, 0-9 and '-'"
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?([KMGTP]i?|k)?", table.volume):
        yield f"kubernetes.volume = {table.volume!r}: write a size as Kubernetes does, such as 20Gi"
    for key, image in (("image", table.image), ("syncer_image", table.syncer_image)):
        if not re.fullmatch(r"[^\s]+", image):
            yield f"kubernetes.{key} = {image!r}: name an image, such as registry.example/skerry:1"
    least = math.ceil(launch.config.learner.leave_timeout_s + LEAVING_S)
    if not least <= table.grace_s <= 86_400:
        yield f"kubernetes.grace_s = {table.grace_s}: must be from {least} (learner.leave_timeout_s and more) to 86400"
    if launch.syncer.port == PAGE_PORT:
        yield f"syncer.port = {PAGE_PORT}: that is the live page's, inside the pod: choose another"
    if table.data_claim and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", table.data_claim):
        yield f"kubernetes.data_claim = {table.data_claim!r}: name a PersistentVolumeClaim of the namespace"
    yield from _where("syncer.where", launch.syncer.where)
    for island in launch.islands:
        yield from (f"island {island.name}: {problem}" for problem in _problems_of(launch, island))


def _problems_of(launch: Launch, island: Island) -> Iterator[str]:
    longest = f"{launch.name}-{island.name}-{LEARNERS_MAX}" if island.machines > 1 else f"{launch.name}-{island.name}"
    if len(longest) > NAME_CHARS_MAX:
        over = len(longest) - NAME_CHARS_MAX
        yield f"its name and the run's are too long for a Job's: shorten one of them by {counted(over, 'letter')}"
    if island.restart == "always":
        yield (
            'restart = "always": a Job brings back what failed, and what ended with 0 has ended: use "failure", and '
            "let the loop go on until learner.step() returns False"
        )
    if island.count > LEARNERS_MAX:
        yield f"count = {island.count}: {LEARNERS_MAX} at most on Kubernetes: make two islands of it"
    if not float(island.gpus * island.workers).is_integer():
        yield f"gpus = {island.gpus:g}: Kubernetes gives whole GPUs to a pod, and {island.workers} workers are one"
    if island.folder and not island.folder.startswith("/"):
        yield f"folder = {island.folder!r}: on Kubernetes it is a path in the image: give it from the root"
    yield from _where("where", island.where)


def _where(key: str, where: str) -> Iterator[str]:
    for part in where.split(",") if where else []:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9./_-]*=[A-Za-z0-9._-]*", part):
            yield f"{key} = {where!r}: write labels of nodes, KEY=VALUE, with a comma between two"


def start(launch: Launch, folder: Path) -> str:
    """Write everything down; what is left to do is the user's."""
    before = (folder / folders.LAUNCHED).exists() and folders.read(folder).handle.get("id")
    identity = before or _identity()
    record = folders.record_of(launch, "kubernetes", folder, id=identity, namespace=launch.kubernetes.namespace)
    folders.write(record)
    root = Path(record.folder)
    _write(_scaled(launch, record), identity, root)
    return f"kubectl apply --server-side -f {shlex.quote(str(root / MANIFESTS))}"


def dry(launch: Launch, folder: Path) -> str:
    """With the launch's own keys, where it has some; else with keys that are good, but that nobody can add to."""
    print("the Secrets in it hold keys: let nobody else read it", file=sys.stderr)
    if (folder / folders.LAUNCHED).exists():
        record = folders.read(folder)
        return manifests.text(_all(_scaled(launch, record), record.handle["id"], folder))
    with tempfile.TemporaryDirectory() as made:
        return manifests.text(_all(launch, _identity(), Path(made)))


def _identity() -> str:
    """Of a launch, in names and labels: another one of the same run's name takes neither its volume nor its keys."""
    return "".join(secrets.choice("bcdfghjklmnpqrstvwxz") for _ in range(6))


def _scaled(launch: Launch, record: Record) -> Launch:
    """With as many learners as were last asked for."""
    counted_so = (_with_count(island, record.counts[island.name]) for island in launch.islands)
    return replace(launch, islands=tuple(counted_so))


def _with_count(island: Island, count: int) -> Island:
    return msgspec.structs.replace(island, count=count)


def _all(launch: Launch, identity: str, folder: Path) -> list[Manifest]:
    files = manifests.files(launch, identity, folder)
    return [manifest for name in sorted(files) for manifest in files[name]]


def _write(launch: Launch, identity: str, folder: Path) -> None:
    root = folder / MANIFESTS
    root.mkdir(mode=0o700, exist_ok=True)
    put_in_place(root / FILE, launch.text.encode())
    for name, several in manifests.files(launch, identity, folder).items():
        anew = root / f"{name}.tmp"
        with fresh(anew, 0o600) as file:
            file.write(manifests.text(several).encode())
        anew.replace(root / name)


# ------------------------------------------------------------------------------------------------- what there is of it


class _Found(NamedTuple):
    """What the cluster has of a launch."""

    pods: list[Manifest]  # the first come first
    jobs: dict[str, Manifest]  # by name
    has_syncer: bool


class _Seen(NamedTuple):
    """How a pod, or what an index of a Job has had of them, does."""

    state: State
    where: str = ""
    since: float = 0.0
    detail: str = ""


def members(record: Record) -> list[Member]:
    found, launch = _found(record), _again(record)
    learners = [_learner(record, launch, island, index, found) for island, index in _wanted(launch)]
    if not found.has_syncer:
        return [Member("syncer", "", "ended", detail="nothing of it is in the cluster"), *learners]
    pods = [pod for pod in found.pods if _label_of(pod, "app.kubernetes.io/component") == "syncer"]
    seen = _pod_seen(pods[-1], "syncer") if pods else _Seen("waiting", detail="it has no pod yet")
    if seen.state == "starting" and learners and all(learner.state == "ended" for learner in learners):
        seen = seen._replace(state="ended", detail=f"the run directory is {RUN_DIR} in {launch.name}-syncer-0")
    restarts = sum(status.get("restartCount", 0) for status in _statuses(pods[-1], "syncer")) if pods else 0
    return [Member("syncer", "", seen.state, seen.where, restarts, seen.since, seen.detail), *learners]


def _wanted(launch: Launch) -> Iterator[tuple[Island, int]]:
    for island in launch.islands:
        for index in range(island.count):
            yield island, index


def _learner(record: Record, launch: Launch, island: Island, index: int, found: _Found) -> Member:
    """Of one machine a pod of its island's Job, of several the pods of its own."""
    name = f"{record.name}-{island.name}" + (f"-{index}" if island.machines > 1 else "")
    job, places = found.jobs.get(name), [index] if island.machines == 1 else [*range(island.machines)]
    if job is None:
        detail = "" if found.has_syncer else "nothing of it is in the cluster"
        return Member(island.learner(index), island.name, "ended", detail=detail)
    pods = [_pods_at(found, name, place) for place in places]
    seen = [_place_seen(job, place, its) for place, its in zip(places, pods, strict=True)]
    worst = min(seen, key=lambda each: SEVERITY.index(each.state))
    where = ", ".join(dict.fromkeys(each.where for each in seen if each.where))
    restarts = sum(max(0, len(its) - 1) for its in pods)
    return Member(island.learner(index), island.name, worst.state, where, restarts, worst.since, worst.detail)


SEVERITY: tuple[State, ...] = ("failed", "restarting", "waiting", "unknown", "starting", "running", "ended")


def _pods_at(found: _Found, job: str, place: int) -> list[Manifest]:
    return [
        pod
        for pod in found.pods
        if _label_of(pod, "job-name") == job and pod["metadata"].get("annotations", {}).get(INDEX_NOTE) == str(place)
    ]


def _place_seen(job: Manifest, place: int, pods: list[Manifest]) -> _Seen:
    """An index of a Job: what it has at present, or else what became of the last."""
    status, last = job.get("status", {}), pods[-1] if pods else None
    if last is not None and last["status"].get("phase") not in ("Failed", "Succeeded"):
        return _pod_seen(last, "learner")
    why = _pod_seen(last, "learner") if last is not None else _Seen("waiting")
    if _is_in(place, status.get("completedIndexes", "")) or why.state == "ended":
        return why._replace(state="ended")
    if _is_in(place, status.get("failedIndexes", "")) or _has(job, "Failed"):
        return why._replace(state="failed")
    return why if last is None else why._replace(state="restarting")


def _pod_seen(pod: Manifest, container: str) -> _Seen:
    status, where = pod.get("status", {}), pod.get("spec", {}).get("nodeName", "")
    since, phase = _time(status.get("startTime") or pod["metadata"].get("creationTimestamp")), status.get("phase")
    statuses = _statuses(pod, container)
    trouble: Manifest = next((each["state"]["waiting"] for each in statuses if "waiting" in each.get("state", {})), {})
    ends = [each.get(key, {}).get("terminated") for each in statuses for key in ("state", "lastState")]
    said = next((_ending(end) for end in ends if end and end.get("exitCode")), "")
    if phase in ("Succeeded", "Failed"):
        state: State = "ended" if phase == "Succeeded" else "failed"
        return _Seen(state, where, since, said or status.get("message", "") or status.get("reason", ""))
    if trouble.get("reason") == "CrashLoopBackOff":
        return _Seen("restarting", where, since, said)
    if phase == "Pending":
        unscheduled = next((c.get("message", "") for c in _conditions(pod, "PodScheduled", "False")), "")
        stuck = trouble.get("reason", "") not in ("", "ContainerCreating", "PodInitializing")
        detail = f"{trouble.get('reason')}: {trouble.get('message', '')}" if stuck else unscheduled
        return _Seen("waiting" if detail else "starting", where, since, detail)
    if phase != "Running":
        return _Seen("unknown", where, since, status.get("reason", ""))
    own = next((each for each in statuses if each["name"] == container), {})
    since = _time(own.get("state", {}).get("running", {}).get("startedAt")) or since
    leaving = "is told to leave" if pod["metadata"].get("deletionTimestamp") else ""
    return _Seen("running" if own.get("ready") else "starting", where, since, leaving)


def _statuses(pod: Manifest, container: str) -> list[Manifest]:
    """Of the container and of those that run before it."""
    status = pod.get("status", {})
    own = [each for each in status.get("containerStatuses", []) if each["name"] == container]
    return [*status.get("initContainerStatuses", []), *own]


def _ending(end: Manifest) -> str:
    """How it ended, with the last line of its log."""
    lines = str(end.get("message", "")).strip().splitlines()
    code = f"exit code {end['exitCode']}" + (f", {end['reason']}" if end.get("reason") not in (None, "Error") else "")
    return f"{code}: {one_line(lines[-1])}" if lines else code


def _conditions(thing: Manifest, kind: str, status: str = "True") -> list[Manifest]:
    found = thing.get("status", {}).get("conditions") or []
    return [each for each in found if each.get("type") == kind and each.get("status") == status]


def _has(job: Manifest, kind: str) -> bool:
    return bool(_conditions(job, kind))


def _is_in(place: int, ranges: str) -> bool:
    """As a Job writes them: 0-2,5."""
    for part in ranges.split(",") if ranges else []:
        first, _, last = part.partition("-")
        if int(first) <= place <= int(last or first):
            return True
    return False


def _time(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _label_of(thing: Manifest, label: str) -> str:
    return str(thing["metadata"].get("labels", {}).get(label, ""))


def logs(record: Record, name: str, follow: bool) -> Iterator[str]:
    """Of every pod that the cluster still knows; of a syncer that was started again in its pod the life before, too."""
    launch, found = _again(record), _found(record)
    known = {"syncer": ""} | {island.learner(index): island.name for island, index in _wanted(launch)}
    if name not in known:
        raise Refusal(f"no {name!r} in this run: {near(name, known)}")
    pods = _pods_of(record, launch, name, known[name], found)
    if not pods:
        raise Refusal(f"{name}: has no pod in the cluster at present: skerry ps {shlex.quote(record.folder)} says more")
    container = "learner" if known[name] else "syncer"
    for at, pod in enumerate(pods):
        said, is_last = ["logs", pod["metadata"]["name"], "-c", container], at == len(pods) - 1
        if container == "syncer" and any(each.get("restartCount") for each in _statuses(pod, container)):
            yield from _lines(record, [*said, "--previous"], may_fail=True)
        yield from _lines(record, [*said, "-f"] if follow and is_last else said, may_fail=not is_last)


def _pods_of(record: Record, launch: Launch, name: str, island: str, found: _Found) -> list[Manifest]:
    if not island:
        return [pod for pod in found.pods if _label_of(pod, "app.kubernetes.io/component") == "syncer"]
    index, several = int(name.rpartition("-")[2]), launch.island(island).machines
    if several == 1:
        return _pods_at(found, f"{record.name}-{island}", index)
    return [pod for place in range(several) for pod in _pods_at(found, f"{record.name}-{name}", place)]


def scale(record: Record, island: str, count: int) -> None:
    """Keys are made here, and the syncer hears of them before the learners that have them come."""
    if count > LEARNERS_MAX:
        raise Refusal(f"{counted(count, 'learner')} of {island}: {LEARNERS_MAX} at most on Kubernetes")
    found, root = _found(record), Path(record.folder)
    if not found.has_syncer:
        raise Refusal(f"{record.name}: nothing of it is in the cluster: kubectl apply -f {root / MANIFESTS} first")
    record.counts[island] = count
    launch = _again(record)
    _write(launch, record.handle["id"], root)
    _kubectl(record, *APPLY, str(root / MANIFESTS / "10-secrets.yaml"))
    _hand_over_book(record, contents(root / "keys" / BOOK))
    wanted = {
        each["metadata"]["name"]
        for each in manifests.island_manifests(launch, launch.island(island), "")
        if each["kind"] == "Job"
    }
    there = [name for name, job in found.jobs.items() if _label_of(job, ISLAND_LABEL) == island]
    if gone := [name for name in there if name not in wanted or _is_over(found.jobs[name])]:
        _delete(record, launch.kubernetes.grace_s, "job", *gone)  # one that has ended is begun anew
    if count:
        _kubectl(record, *APPLY, str(root / MANIFESTS / f"30-{island}.yaml"))
    folders.write(record)


APPLY = ("apply", "--server-side", "--force-conflicts", "-f")


def _is_over(job: Manifest) -> bool:
    return _has(job, "Complete") or _has(job, "Failed")


def _hand_over_book(record: Record, book: bytes) -> None:
    """To the syncer that runs; one that is away has no door to come through, and the same command does it later."""
    path = f"{RUN_DIR}/keys/{BOOK}"
    put = f"umask 077; cat > {path}.tmp && mv {path}.tmp {path}"
    pod = f"{record.name}-syncer-0"
    _kubectl(record, "exec", "-i", pod, "-c", "syncer", "--", "sh", "-ec", put, given=book)


def down(record: Record) -> None:
    """Learners first, whose work is then merged; the volume stays."""
    ours = ["-l", f"{LAUNCH_LABEL}={record.handle['id']}"]
    _delete(record, _again(record).kubernetes.grace_s, "job", *ours)
    _delete(record, SYNCER_GRACE_S, "statefulset", *ours)
    _delete(record, 0, "networkpolicy,poddisruptionbudget,service,secret", *ours)


def _delete(record: Record, grace_s: int, *what: str) -> None:
    """Returns when its pods are gone, too."""
    wait_s = grace_s + KUBECTL_S
    words = ["--ignore-not-found", "--cascade=foreground", "--wait", f"--timeout={wait_s:g}s"]
    _kubectl(record, "delete", *what, *words, timeout_s=wait_s + KUBECTL_S)


# ------------------------------------------------------------------------------------------------------------ kubectl


def _again(record: Record) -> Launch:
    """What was launched, with as many learners as were last asked for."""
    file = Path(record.folder) / MANIFESTS / FILE
    return _scaled(spec.read(file, record.overrides), record)


def _found(record: Record) -> _Found:
    ours = f"{LAUNCH_LABEL}={record.handle['id']}"
    answer = _kubectl(record, "get", "pods,jobs,statefulsets", "-l", ours, "-o", "json")
    try:
        items = msgspec.json.decode(answer)["items"]
        kinds = {kind: [item for item in items if item["kind"] == kind] for kind in ("Pod", "Job", "StatefulSet")}
        pods = sorted(kinds["Pod"], key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
        return _Found(pods, {job["metadata"]["name"]: job for job in kinds["Job"]}, bool(kinds["StatefulSet"]))
    except (msgspec.DecodeError, KeyError, TypeError):
        raise Refusal("kubectl get: its answer is no list of objects: check that kubectl is Kubernetes' own") from None


def _argv(record: Record, words: Sequence[str]) -> list[str]:
    argv = ["kubectl", f"--namespace={record.handle['namespace']}", *words]
    if shutil.which("kubectl") is None:
        raise Refusal(f"kubectl is not on the PATH: install it, or run where it is: {shlex.join(argv)}")
    return argv


def _kubectl(record: Record, *words: str, given: bytes = b"", timeout_s: float = KUBECTL_S) -> bytes:
    argv = _argv(record, words)
    try:
        done = subprocess.run(argv, input=given, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise Refusal(
            f"kubectl {words[0]}: no answer within {timeout_s:g} s: look at the cluster, then again"
        ) from None
    if done.returncode:
        raise Refusal(_complaint(words, done.stderr))
    return done.stdout


def _lines(record: Record, words: Sequence[str], *, may_fail: bool) -> Iterator[str]:
    """As they come; what is followed ends with the pod, or with whoever reads."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(_argv(record, words), stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.decode(errors="replace").rstrip("\r\n")
            code = process.wait(KUBECTL_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if code:
            errors.seek(0, os.SEEK_SET)
            complaint = _complaint(words, errors.read())
            if not may_fail:
                raise Refusal(complaint)
            yield complaint


def _complaint(words: Sequence[str], stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines() or ["it failed without a word"]
    return f"kubectl {words[0]}: {one_line(lines[-1])}"
