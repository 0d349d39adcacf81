"""The engine Kubernetes: plain manifests, which the user applies; kubectl looks at what they began, scales and ends it.

    RUN/kubernetes/10-secrets.yaml   the launched file, the syncer's keys, a key for each learner, what `env` says
    RUN/kubernetes/20-syncer.yaml    who may dial whom, and the syncer's Service, PodDisruptionBudget and StatefulSet
    RUN/kubernetes/30-ISLAND.yaml    the Jobs of an island

An island is an Indexed Job with a completion for each learner: the index makes a stable name, a learner that ends with
0 has ended for good, a failed one is replaced, and both numbers of the Job change together when the island is scaled. A
StatefulSet has stable names too, but starts again what has ended, and would do so for ever after the run is closed.
Where a learner has several machines, it is a Job of its own with a completion for each of them.

The private key of the run's authority stays on this machine, in RUN/keys, so only here can keys be made. The run
directory is on the syncer's volume, which outlives everything that is begun here. The learners' image, in which there
may be anybody's code, never sees that volume: in the syncer's pod it makes the first values in a folder of its own.
"""

from __future__ import annotations

import base64
import json
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
from typing import Any, NamedTuple

import msgspec
import yaml

from skerry.engines import Member, State, spec
from skerry.engines import folder as folders
from skerry.engines.command import learner_argv, learner_env, meeting, syncer_argv
from skerry.engines.folder import Record
from skerry.engines.spec import Island, Launch
from skerry.errors import Refusal, one_line
from skerry.run.keys import ADMIN_FILE, BOOK, SYNCER, Keys
from skerry.store.files import contents, fresh, put_in_place
from skerry.text import counted, near

WORK = "/work"  # where a command runs in its image, unless its island names another folder
MANIFESTS = "kubernetes"  # below the folder of a launch
LEARNER_KEYS = "learner-keys"  # there too, a file for each learner
FILE, SCRIPT = "run.toml", "genesis.py"
VOLUME, RUN_DIR, GENESIS = "/skerry", "/skerry/run", "/skerry/genesis.safetensors"  # in the syncer's pod
SETTINGS, HANDED, PRIVATE, DATA = "/etc/skerry", "/etc/skerry-keys", "/private", "/data"
MADE, THERE = "/made/genesis.safetensors", "/made/there"  # by the learners' image; the volume has first values already
KEY_FILE = f"{PRIVATE}/learner.key"
ENDED = "/tmp/ended"  # written by engines/pod.py when the syncer has ended for good
PORT, PAGE_PORT, MEETING_PORT = 7077, 8080, 29400
USER = 65532  # of every container; docker/Dockerfile makes it
SYNCER_GRACE_S = 90  # it writes checkpoints, for 60 s at most
LEAVING_S = 5.0  # that a learner needs beyond learner.leave_timeout_s
STARTING_S = 3600  # a syncer with a large model takes a while before its port is open
SILENT_MIN = 5  # minutes without a status, which a syncer writes twice a second whatever else it does
LEARNERS_MAX = 400  # of an island: their keys are one Secret, which may have 1 MiB
NAME_CHARS_MAX = 52  # of a Job, so that its pods' names have room for an index
RETRIES = 2**31 - 1  # the most there is: a crash loop never ends a run
KUBECTL_S = 60.0  # for one that only asks
LAUNCH_LABEL, ISLAND_LABEL, LEARNER_LABEL = "skerry/launch", "skerry/island", "skerry/learner"
INDEX, INDEX_NOTE = "JOB_COMPLETION_INDEX", "batch.kubernetes.io/job-completion-index"
RANK = "\0rank"  # a word of a command that Kubernetes works out in each pod
SPOT = (  # how clouds keep others off machines that they may take away
    "cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible", "kubernetes.azure.com/scalesetpriority",
)  # fmt: skip

Manifest = dict[str, Any]

# In the learners' image, for the syncer's has no torch.
BUILT_IN = """\
# The built-in model's first values.
import json
import sys
from pathlib import Path

from skerry import config, save_genesis
from skerry.train.loop import model_of
from skerry.train.shapes import resolved

preset, file, overrides, out = sys.argv[1:]
said = resolved(config.PRESETS[preset](), Path(file), json.loads(overrides))
save_genesis(model_of(config.validate(said)), out)
"""


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
        return _text(_all(_scaled(launch, record), record.handle["id"], folder))
    with tempfile.TemporaryDirectory() as made:
        return _text(_all(launch, _identity(), Path(made)))


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
    files = _files(launch, identity, folder)
    return [manifest for name in sorted(files) for manifest in files[name]]


def _files(launch: Launch, identity: str, folder: Path) -> dict[str, list[Manifest]]:
    """By the name of the file; keys that are not there yet are made."""
    files = {
        "10-secrets.yaml": secret_manifests(launch, identity, folder),
        "20-syncer.yaml": syncer_manifests(launch, identity),
    }
    files |= {f"30-{island.name}.yaml": island_manifests(launch, island, identity) for island in launch.islands}
    for manifest in (each for several in files.values() for each in several):
        _label(manifest, launch, identity)
    return files


def _write(launch: Launch, identity: str, folder: Path) -> None:
    root = folder / MANIFESTS
    root.mkdir(mode=0o700, exist_ok=True)
    put_in_place(root / FILE, launch.text.encode())
    for name, manifests in _files(launch, identity, folder).items():
        anew = root / f"{name}.tmp"
        with fresh(anew, 0o600) as file:
            file.write(_text(manifests).encode())
        anew.replace(root / name)


class _Dumper(yaml.SafeDumper):
    """Quotes what a reader of YAML could take for something else than text: Kubernetes' own takes 1e5 for a number."""

    def ignore_aliases(self, data: object) -> bool:
        return True  # what is said twice is written twice


def _scalar(dumper: Any, text: str) -> Any:
    is_plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9/._:-]+", text) and text.lower() not in NO_TEXT
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None if is_plain else "'"
    )


NO_TEXT = {"yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}
_Dumper.add_representer(str, _scalar)


def _text(manifests: Sequence[Manifest]) -> str:
    form = {"sort_keys": False, "explicit_start": True, "allow_unicode": True, "width": 100}
    return str(yaml.dump_all(manifests, Dumper=_Dumper, **form))


# ---------------------------------------------------------------------------------------------------- the manifests


def secret_manifests(launch: Launch, identity: str, folder: Path) -> list[Manifest]:
    """Of the syncer what it serves with, but not what makes keys; of each island a key a learner."""
    keys = Keys(folder)
    kept = folder / LEARNER_KEYS
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    issued = {row.name for row in keys.rows()} if (keys.folder / BOOK).exists() else set()
    islands = []
    for island in launch.islands:
        names = [island.learner(index) for index in range(island.count)]
        for name in names:
            if name not in issued:
                _issue(keys, name, kept / f"{name}.key")
        islands.append((island, {f"{name}.key": _kept_key(kept / f"{name}.key") for name in names}))
    keys.syncer_file()
    keys.admin_file()
    own = {name: contents(keys.folder / name) for name in (SYNCER, ADMIN_FILE, BOOK)}
    settings = {FILE: launch.text.encode()} | ({} if launch.syncer.genesis else {SCRIPT: BUILT_IN.encode()})
    return [
        _secret(f"{launch.name}-settings-{identity}", settings, "syncer"),
        *_env_secret(launch, None, identity),
        *(each for island in launch.islands for each in _env_secret(launch, island, identity)),
        _secret(_keys_name(launch, "syncer", identity), own, "syncer"),
        *(_secret(_keys_name(launch, island.name, identity), found, "learner", island) for island, found in islands),
    ]


def _kept_key(path: Path) -> bytes:
    try:
        return contents(path)
    except FileNotFoundError:
        raise Refusal(f"{path}: is missing, and the run's book has its key: restore it from a copy") from None


def _issue(keys: Keys, name: str, path: Path) -> None:
    def hand_over(pem: bytes) -> None:
        with fresh(path, 0o600) as file:
            file.write(pem)

    keys.issue(name, hand_over=hand_over)


def _keys_name(launch: Launch, whose: str, identity: str) -> str:
    return f"{launch.name}-{whose}-keys-{identity}"


def _env_secret(launch: Launch, island: Island | None, identity: str) -> list[Manifest]:
    """What `env` says: a password is often among it, and more people may look at pods than at Secrets."""
    env = island.env if island else launch.syncer.env
    files = {key: value.encode() for key, value in env.items()}
    return [_secret(_env_name(launch, island, identity), files, "learner" if island else "syncer", island)] * bool(env)


def _env_name(launch: Launch, island: Island | None, identity: str) -> str:
    return f"{launch.name}-{island.name if island else 'syncer'}-env-{identity}"


def _env_of(launch: Launch, island: Island | None, identity: str) -> list[Manifest]:
    """Of a container: what `_env_secret` holds."""
    secret = _env_name(launch, island, identity)
    return [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for key in (island.env if island else launch.syncer.env)
    ]


def _secret(name: str, files: dict[str, bytes], component: str, island: Island | None = None) -> Manifest:
    data = {file: base64.b64encode(content).decode() for file, content in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", **_named(name, component, island), "type": "Opaque", "data": data}


def syncer_manifests(launch: Launch, identity: str) -> list[Manifest]:
    name, selector = f"{launch.name}-syncer", _selector(launch, "syncer")
    port = launch.syncer.port or PORT
    service = {"apiVersion": "v1", "kind": "Service", **_named(name, "syncer")}
    budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", **_named(name, "syncer")}
    stateful = {"apiVersion": "apps/v1", "kind": "StatefulSet", **_named(name, "syncer")}
    service["spec"] = {"selector": selector, "ports": [{"name": "learners", "port": port, "targetPort": "learners"}]}
    budget["spec"] = {
        "minAvailable": 1,
        "selector": {"matchLabels": selector},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",  # once the run is closed, nobody's drain waits for it
    }
    stateful["spec"] = {
        "replicas": 1,
        "serviceName": name,
        "selector": {"matchLabels": selector},
        "template": {"metadata": {}, "spec": _syncer_pod(launch, port, identity)},
        "volumeClaimTemplates": [_claim(launch, identity)],
    }
    return [*_doors(launch, port, identity), service, budget, stateful]


def _doors(launch: Launch, port: int, identity: str) -> list[Manifest]:
    """The syncer's port is open to pods of the launch, and nobody dials a learner. Whom they dial is theirs to say."""
    from_ours = {"from": [{"podSelector": {"matchLabels": {LAUNCH_LABEL: identity}}}], "ports": [{"port": port}]}
    syncer = _named(f"{launch.name}-syncer", "syncer")
    learners = _named(f"{launch.name}-learners", "learner")
    return [
        _door(syncer, _selector(launch, "syncer") | {LAUNCH_LABEL: identity}, [from_ours]),
        _door(learners, _selector(launch, "learner") | {LAUNCH_LABEL: identity}, []),
    ]


def _door(named: Manifest, whose: dict[str, str], ingress: list[Manifest]) -> Manifest:
    spec = {"podSelector": {"matchLabels": whose}, "policyTypes": ["Ingress"], "ingress": ingress}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", **named, "spec": spec}


def _claim(launch: Launch, identity: str) -> Manifest:
    wanted: Manifest = {"accessModes": ["ReadWriteOnce"]}
    wanted |= {"storageClassName": launch.kubernetes.storage_class} if launch.kubernetes.storage_class else {}
    wanted["resources"] = {"requests": {"storage": launch.kubernetes.volume}}
    return {"metadata": {"name": f"run-{identity}"}, "spec": wanted}


def _syncer_pod(launch: Launch, port: int, identity: str) -> Manifest:
    table, mounts = launch.kubernetes, [_mount(f"run-{identity}", VOLUME), _mount("settings", SETTINGS, readonly=True)]
    mounts += [_mount("private", PRIVATE), _mount("tmp", "/tmp")]
    served = syncer_argv(
        launch, "python", RUN_DIR, f"{SETTINGS}/{FILE}", GENESIS, "0.0.0.0", port, "--http-port", str(PAGE_PORT)
    )
    # A link there would be of the learners' image, and lead to what only the syncer's may read.
    is_file = f"test -f {MADE} && test ! -L {MADE}"
    take = f"{{ test -e {GENESIS} || {{ {is_file} && cp {MADE} {GENESIS}.tmp && mv {GENESIS}.tmp {GENESIS}; }}; }}"
    keys = f"install -d -m 700 {RUN_DIR} {RUN_DIR}/keys && install -m 600 {HANDED}/* {RUN_DIR}/keys/"
    made, handed = _mount("made", str(Path(MADE).parent)), _mount("keys", HANDED, readonly=True)
    return {
        **_pod(SYNCER_GRACE_S, launch.syncer.where),
        "initContainers": [
            _container(
                "look",
                table.syncer_image,
                ["sh", "-ec", f"if test -e {GENESIS}; then : > {THERE}; fi"],
                mounts=[_mount(f"run-{identity}", VOLUME, readonly=True), made],
            ),
            _genesis_container(launch, made),
            _container("keys", table.syncer_image, ["sh", "-ec", f"{take} && {keys}"], mounts=[*mounts, made, handed]),
        ],
        "containers": [
            {
                **_container(
                    "syncer",
                    table.syncer_image,
                    ["python", "-m", "skerry.engines.pod", ENDED, *_literal(served)],
                    mounts=mounts,
                    env=_without(_scratch() | {"PYTHONUNBUFFERED": "1"}, launch.syncer.env),
                    more_env=_env_of(launch, None, identity),
                ),
                "ports": [{"name": "learners", "containerPort": port}],
                "resources": _resources(launch.syncer.cpus, launch.syncer.memory_gib),
                **_probes(port),
            }
        ],
        "volumes": [
            {"name": "settings", "secret": {"secretName": f"{launch.name}-settings-{identity}", "defaultMode": 0o440}},
            {"name": "keys", "secret": {"secretName": _keys_name(launch, "syncer", identity), "defaultMode": 0o440}},
            {"name": "made", "emptyDir": {}},
            {"name": "made-tmp", "emptyDir": {}},
            *_scratch_volumes(),
        ],
    }


def _genesis_container(launch: Launch, made: Manifest) -> Manifest:
    """The learners' image, for the syncer's has no torch. Nothing that it can write to is loaded by the syncer, and of
    what the syncer has it sees no more than the launched file, where it needs that."""
    mounts, argv = [made, _mount("made-tmp", "/tmp")], ["cp", launch.syncer.genesis, MADE]
    if not launch.syncer.genesis:
        mounts.append(_mount("settings", SETTINGS, readonly=True))
        overrides = json.dumps(launch.overrides)
        argv = ["python", f"{SETTINGS}/{SCRIPT}", launch.syncer.preset, f"{SETTINGS}/{FILE}", overrides, MADE]
    line = f"test -e {THERE} || {shlex.join(argv)}"
    words = ["sh", "-ec", *_literal([line])]
    return _container("genesis", launch.kubernetes.image, words, mounts=mounts, env={"HOME": "/tmp"})


def _without(env: dict[str, str], said: dict[str, str]) -> dict[str, str]:
    """Ours, but for what the file says, too, and says otherwise."""
    return {key: value for key, value in env.items() if key not in said}


def _probes(port: int) -> Manifest:
    """It has started when its port is open, and while that is so learners find it. It is killed if it has written no
    status for minutes, which is when its deciding thread hangs: a busy one is late by seconds. Once the syncer has
    ended for good nothing is asked of it any more."""
    dial = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5).close()"
    is_open = f'test -e {ENDED} || exec python -c "{dial}"'
    is_fresh = f"test -e {ENDED} || find {RUN_DIR}/status.json -mmin -{SILENT_MIN} | grep -q ."
    return {
        "startupProbe": {
            "exec": {"command": ["sh", "-c", is_open]},
            "periodSeconds": 5,
            "timeoutSeconds": 10,
            "failureThreshold": STARTING_S // 5,
        },
        "readinessProbe": {"tcpSocket": {"port": "learners"}, "periodSeconds": 10, "timeoutSeconds": 5},
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", is_fresh]},
            "periodSeconds": 60,
            "timeoutSeconds": 30,
            "failureThreshold": 3,
        },
    }


def island_manifests(launch: Launch, island: Island, identity: str) -> list[Manifest]:
    """One Job; or where a learner has several machines, a Job for each, and a Service by which they find each other."""
    name = f"{launch.name}-{island.name}"
    if island.machines == 1:
        return [_job(launch, island, identity, name, island.count, f"{island.name}-$({INDEX})")] if island.count else []
    service = {"apiVersion": "v1", "kind": "Service", **_named(name, "learner", island)}
    service["spec"] = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # they meet before any of them is ready
        "selector": _selector(launch, "learner") | {ISLAND_LABEL: island.name},
        "ports": [{"name": "meeting", "port": MEETING_PORT}],
    }
    jobs = [
        _job(launch, island, identity, f"{name}-{index}", island.machines, island.learner(index))
        for index in range(island.count)
    ]
    doors = [_own_door(launch, island, island.learner(index), identity) for index in range(island.count)]
    return [service, *doors, *jobs]


def _own_door(launch: Launch, island: Island, learner: str, identity: str) -> Manifest:
    """Machines of one learner dial each other: what PyTorch has there asks nobody who he is."""
    whose = {LAUNCH_LABEL: identity, LEARNER_LABEL: learner}
    named = _named(f"{launch.name}-{learner}", "learner", island)
    return _door(named, whose, [{"from": [{"podSelector": {"matchLabels": whose}}]}])


def _job(launch: Launch, island: Island, identity: str, name: str, completions: int, learner: str) -> Manifest:
    job = {"apiVersion": "batch/v1", "kind": "Job", **_named(name, "learner", island)}
    labels = {LEARNER_LABEL: learner} if island.machines > 1 else {}
    job["metadata"]["labels"] |= labels
    job["spec"] = {
        "completionMode": "Indexed",
        "completions": completions,
        "parallelism": completions,
        **_failures(island),
        "podReplacementPolicy": "Failed",  # a name is never two processes at a time
        "template": {"metadata": {"labels": labels}, "spec": _learner_pod(launch, island, identity, name, learner)},
    }
    return job


def _failures(island: Island) -> Manifest:
    """What the cluster takes away is brought back at once, what fails by itself after ever longer waits."""
    if island.restart == "never":
        return {"backoffLimit": 0} if island.machines > 1 else {"backoffLimitPerIndex": 0}
    taken = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"backoffLimit": RETRIES, "podFailurePolicy": {"rules": [taken]}}


def _learner_pod(launch: Launch, island: Island, identity: str, job: str, learner: str) -> Manifest:
    table = launch.kubernetes
    own = _mount("keys", f"{HANDED}/learner.key", readonly=True) | {"subPathExpr": "$(SKERRY_NAME).key"}
    mounts = [_mount("private", PRIVATE), _mount("tmp", "/tmp"), _mount("shared", "/dev/shm")]
    mounts += [_mount("data", DATA, readonly=True)] if table.data_claim else []
    address = f"{launch.name}-syncer.{table.namespace}.svc:{launch.syncer.port or PORT}"
    env = _without(_scratch() | learner_env(island, 0, address, key_file=KEY_FILE), island.env)
    words, more_env = _learner_words(launch, island, job), _env_of(launch, island, identity)
    container = _container("learner", table.image, words, mounts=mounts, env=env, more_env=more_env)
    container["env"] = _indexed(learner, container["env"])
    container |= {} if island.is_built_in else {"workingDir": island.folder or WORK}
    container["resources"] = _resources(
        island.cpus * island.workers, island.memory_gib * island.workers, island.gpus * island.workers
    )
    take = _container("key", table.image, ["install", "-m", "600", f"{HANDED}/learner.key", KEY_FILE])
    take |= {"env": _indexed(learner), "volumeMounts": [_mount("private", PRIVATE), own]}
    return {
        **_pod(table.grace_s, island.where, _tolerations(island)),
        "restartPolicy": "Never",  # a failed pod is replaced, wherever there is room
        "shareProcessNamespace": True,  # then SIGTERM ends a command that has no handler for it yet, too
        **({"subdomain": f"{launch.name}-{island.name}"} if island.machines > 1 else {}),
        "initContainers": [take],
        "containers": [container],
        "volumes": [
            {"name": "keys", "secret": {"secretName": _keys_name(launch, island.name, identity), "defaultMode": 0o440}},
            {"name": "shared", "emptyDir": {"medium": "Memory"}},
            *([_data_volume(table.data_claim)] if table.data_claim else []),
            *_scratch_volumes(),
        ],
    }


def _data_volume(claim: str) -> Manifest:
    return {"name": "data", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}


def _learner_words(launch: Launch, island: Island, job: str) -> list[str]:
    if island.machines == 1:
        return _literal(learner_argv(island, "python"))
    host = f"{job}-0.{launch.name}-{island.name}"
    words = _literal(learner_argv(island, "python", meeting(island.machines, RANK, host, str(MEETING_PORT))))
    return [f"$({INDEX})" if word == RANK else word for word in words]


def _tolerations(island: Island) -> list[Manifest]:
    keys = [*(SPOT if island.preemptible else ()), *(["nvidia.com/gpu"] if island.gpus else [])]
    return [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in keys]


def _indexed(learner: str, env: Sequence[Manifest] = ()) -> list[Manifest]:
    """The pod's number before all that speaks of it: a variable knows only those above."""
    number = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_NOTE}']"}}
    named: list[Manifest] = [{"name": INDEX, "valueFrom": number}, {"name": "SKERRY_NAME", "value": learner}]
    return [*named, *(each for each in env if each["name"] != "SKERRY_NAME")]


# ------------------------------------------------------------------------------------------------- parts of them all


def _named(name: str, component: str, island: Island | None = None) -> Manifest:
    labels = {"app.kubernetes.io/component": component} | ({ISLAND_LABEL: island.name} if island else {})
    return {"metadata": {"name": name, "labels": labels}}


def _selector(launch: Launch, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/instance": launch.name, "app.kubernetes.io/component": component}


def _label(manifest: Manifest, launch: Launch, identity: str) -> None:
    """On everything and its pods: by these they are found again, and told from those of a run of the same name."""
    common = {
        "app.kubernetes.io/name": "skerry",
        "app.kubernetes.io/instance": launch.name,
        "app.kubernetes.io/managed-by": "skerry",
        LAUNCH_LABEL: identity,
    }
    about = manifest["metadata"]
    about["namespace"] = launch.kubernetes.namespace
    about["labels"] = common | about["labels"]
    if template := manifest.get("spec", {}).get("template"):
        template["metadata"]["labels"] = about["labels"] | template["metadata"].get("labels", {})
    for claim in manifest.get("spec", {}).get("volumeClaimTemplates", ()):
        claim["metadata"]["labels"] = about["labels"]


def _pod(grace_s: int, where: str, tolerations: Sequence[Manifest] = ()) -> Manifest:
    """What every pod has: no rights beyond its own files, and nothing of the cluster's."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",  # else each start would open the run directory to the group
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"nodeSelector": dict(part.split("=", 1) for part in where.split(","))} if where else {}),
        **({"tolerations": list(tolerations)} if tolerations else {}),
    }


def _container(
    name: str,
    image: str,
    command: Sequence[str],
    *,
    mounts: Sequence[Manifest] = (),
    env: dict[str, str] | None = None,
    more_env: Sequence[Manifest] = (),
) -> Manifest:
    own = [{"name": key, "value": _literal([value])[0]} for key, value in (env or {}).items()]
    return {
        "name": name,
        "image": image,
        "command": list(command),
        "env": [*own, *more_env],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",  # by which ps shows why it failed
        "volumeMounts": list(mounts),
    }


def _literal(words: Sequence[str]) -> list[str]:
    """Kubernetes puts variables in where a text says $(NAME), and makes one $ of two: these say what they mean."""
    return [word.replace("$", "$$") for word in words]


def _mount(name: str, path: str, *, readonly: bool = False) -> Manifest:
    return {"name": name, "mountPath": path} | ({"readOnly": True} if readonly else {})


def _scratch() -> dict[str, str]:
    return {"HOME": "/tmp", "NUMBA_CACHE_DIR": f"{PRIVATE}/kernels"}


def _scratch_volumes() -> list[Manifest]:
    """`private` is in memory, where only owners may remove: compiled kernels are not loaded from anywhere else."""
    private = {"medium": "Memory", "sizeLimit": "256Mi"}
    return [{"name": "private", "emptyDir": private}, {"name": "tmp", "emptyDir": {}}]


def _resources(cpus: float, memory_gib: float, gpus: float = 0.0) -> Manifest:
    """Cores have no upper limit: who needs more for a moment takes what is idle, and nobody is held up."""
    memory = {"memory": f"{math.ceil(memory_gib * 1024)}Mi"} if memory_gib else {}
    limits = memory | ({"nvidia.com/gpu": f"{gpus:g}"} if gpus else {})
    return {"requests": {"cpu": f"{math.ceil(cpus * 1000)}m"} | memory} | ({"limits": limits} if limits else {})


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
        for each in island_manifests(launch, launch.island(island), "")
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
