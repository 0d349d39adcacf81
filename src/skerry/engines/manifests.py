"""What a launch is on Kubernetes, as plain manifests; `kubernetes.py` writes them down and lets kubectl see to them.

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
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from skerry.engines.command import learner_argv, learner_env, meeting, syncer_argv
from skerry.engines.spec import Island, Launch
from skerry.errors import Refusal
from skerry.python import code_argv, module_argv
from skerry.run.keys import ADMIN_FILE, BOOK, SYNCER, Keys
from skerry.store.files import contents, fresh

WORK = "/work"  # where a command runs in its image, unless its island names another folder
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
STARTING_S = 3600  # a syncer with a large model takes a while before its port is open
SILENT_MIN = 5  # minutes without a status, which a syncer writes twice a second whatever else it does
RETRIES = 2**31 - 1  # the most there is: a crash loop never ends a run
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


def files(launch: Launch, identity: str, folder: Path) -> dict[str, list[Manifest]]:
    """By the name of the file; keys that are not there yet are made."""
    files = {
        "10-secrets.yaml": secret_manifests(launch, identity, folder),
        "20-syncer.yaml": syncer_manifests(launch, identity),
    }
    files |= {f"30-{island.name}.yaml": island_manifests(launch, island, identity) for island in launch.islands}
    for manifest in (each for several in files.values() for each in several):
        _label(manifest, launch, identity)
    return files


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


def text(manifests: Sequence[Manifest]) -> str:
    form = {"sort_keys": False, "explicit_start": True, "allow_unicode": True, "width": 100}
    return str(yaml.dump_all(manifests, Dumper=_Dumper, **form))


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
                    module_argv("skerry.engines.pod", ENDED, *_literal(served), python="python"),
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
    dial = f'import socket; socket.create_connection(("127.0.0.1", {port}), 5).close()'
    is_open = f"test -e {ENDED} || exec {shlex.join(code_argv(dial, python='python'))}"
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
