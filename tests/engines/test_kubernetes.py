"""The engine Kubernetes: manifests that Kubernetes takes, whose commands run; and kubectl, by a stand-in.

No cluster is here. Schemas are those of Kubernetes' own releases, YAML is read by kubectl where there is one, the
commands of the manifests run as processes of this machine, and what a cluster would answer is written down below.
"""

import base64
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from skerry import cli
from skerry.engines import folder, kubernetes, spec
from skerry.errors import Refusal

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

EVERYTHING = """
[run]
name = "mine"
tokens = 1e6
learners = 12

[syncer]
memory_gib = 4
where = "pool=stable"
env = {PRICE = "1e5", ASK = "y"}

[kubernetes]
namespace = "training"
image = "registry.example/skerry:1"
syncer_image = "registry.example/skerry-syncer:1"
storage_class = "fast"
data_claim = "corpus"

[[islands]]
name = "gpu"
count = 3
command = ["python", "train.py", "--out=$(HOME)"]
folder = "/work"
gpus = 2
memory_gib = 16
preemptible = true
where = "zone=a,kind=l4"

[[islands]]
name = "wide"
count = 2
machines = 2
workers = 2
command = ["python", "train.py"]

[[islands]]
name = "once"
restart = "never"

[[islands]]
name = "later"
count = 0
"""


def launched(tmp_path, text=EVERYTHING, *overrides):
    (tmp_path / "run.toml").write_text(text)
    launch = spec.read(tmp_path / "run.toml", overrides)
    assert list(kubernetes.problems(launch)) == []
    return launch


def manifests_of(root):
    return [each for file in sorted(root.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text()) if each]


@pytest.fixture
def written(tmp_path):
    kubernetes.start(launched(tmp_path), tmp_path / "run")
    return tmp_path / "run"


def one(manifests, kind, name):
    """Names of Secrets and settings end with the launch's own letters."""
    names = (name, f"{name}-{manifests[0]['metadata']['labels']['skerry/launch']}")
    return next(each for each in manifests if each["kind"] == kind and each["metadata"]["name"] in names)


def pods_of(manifests):
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in manifests if "Set" in each["kind"]
    } | {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in manifests if each["kind"] == "Job"}


def containers_of(pod):
    return {each["name"]: each for each in [*pod["initContainers"], *pod["containers"]]}


# ------------------------------------------------------------------------------------------------------ manifests


@pytest.mark.parametrize("version", ["1.29", "1.31", "1.33", "1.35", "1.37"])
def test_every_manifest_is_one_by_the_schemas_of_kubernetes(written, version):
    manifests = manifests_of(written / "kubernetes")
    assert {each["kind"] for each in manifests} == {
        "Secret", "NetworkPolicy", "Service", "PodDisruptionBudget", "StatefulSet", "Job",
    }  # fmt: skip
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    wrong = one(manifests, "Job", "mine-gpu")
    wrong["spec"]["parallelism"] = "three"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl reads its own YAML")
def test_kubectl_reads_what_was_meant(written):
    """Text that another reader of YAML takes for numbers or truths is text to it, too."""
    words = ["kubectl", "annotate", "--local", "-f", written / "kubernetes", "seen=1", "-o", "json"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    decoder, read = json.JSONDecoder(), []
    while said := said.strip():
        found, end = decoder.raw_decode(said)
        read, said = [*read, *found.get("items", [found])], said[end:]
    for each in read:
        del each["metadata"]["annotations"]
    meant = manifests_of(written / "kubernetes")
    assert len(read) == len(meant) > 8
    assert read == meant


def test_no_pod_may_do_more_than_train(written):
    pods = pods_of(manifests_of(written / "kubernetes"))
    assert pods.keys() == {"mine-syncer", "mine-gpu", "mine-wide-0", "mine-wide-1", "mine-once"}
    for pod in pods.values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers_of(pod).values():
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] and rights["capabilities"] == {"drop": ["ALL"]}
            assert rights["allowPrivilegeEscalation"] is False


def test_what_makes_keys_stays_here_and_a_learner_sees_its_own_alone(written):
    authority = (written / "keys" / "ca.pem").read_bytes().partition(b"-----END PRIVATE KEY")[0]
    manifests = manifests_of(written / "kubernetes")
    secrets = {each["metadata"]["name"][:-7]: each["data"] for each in manifests if each["kind"] == "Secret"}
    assert secrets["mine-syncer-keys"].keys() == {"syncer.pem", "admin.pem", "issued.json"}
    assert secrets["mine-gpu-keys"].keys() == {"gpu-0.key", "gpu-1.key", "gpu-2.key"}
    held = [base64.b64decode(data) for secret in secrets.values() for data in secret.values()]
    assert len(held) > 6 and not any(authority in each for each in held)
    gpu = containers_of(pods_of(manifests)["mine-gpu"])
    (own,) = [each for each in gpu["key"]["volumeMounts"] if each["name"] == "keys"]
    assert own["subPathExpr"] == "$(SKERRY_NAME).key"
    assert "keys" not in {each["name"] for each in gpu["learner"]["volumeMounts"]}
    secret_files = [written / "kubernetes" / "10-secrets.yaml", *(written / "learner-keys").iterdir()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in secret_files} == {0o600}


@pytest.mark.parametrize("genesis", ["", 'genesis = "/work/genesis.safetensors"'])
def test_the_learners_image_sees_nothing_of_the_syncers_pod_but_a_folder_of_its_own(tmp_path, genesis):
    """Anybody's code may be in it: neither keys nor the run, and nothing that the syncer would load as code."""
    kubernetes.start(launched(tmp_path, EVERYTHING.replace("memory_gib = 4", genesis)), tmp_path / "run")
    pod = pods_of(manifests_of(tmp_path / "run" / "kubernetes"))["mine-syncer"]
    of_learners = [each for each in containers_of(pod).values() if each["image"] == "registry.example/skerry:1"]
    assert [each["name"] for each in of_learners] == ["genesis"]
    mounts = {each["name"]: each for each in of_learners[0]["volumeMounts"]}
    assert mounts.keys() == {"made", "made-tmp"} | (set() if genesis else {"settings"})
    assert genesis or mounts["settings"]["readOnly"]
    syncer = containers_of(pod)["syncer"]
    assert not {"made", "made-tmp"} & {each["name"] for each in syncer["volumeMounts"]}


def test_no_link_that_the_learners_image_made_is_followed_to_the_syncers_keys(tmp_path):
    kubernetes.start(launched(tmp_path, TINY), tmp_path / "run")
    here = Here(tmp_path, manifests_of(tmp_path / "run" / "kubernetes"), 1)
    (here.root / "made" / "genesis.safetensors").symlink_to(here.root / "etc/skerry-keys/syncer.pem")
    assert here.begin(containers_of(pods_of(here.manifests)["tiny-syncer"])["keys"]).wait(60) != 0
    assert not (here.root / "skerry" / "genesis.safetensors").exists()


def test_what_env_says_is_in_secrets_alone(tmp_path):
    text = EVERYTHING.replace('PRICE = "1e5"', 'TOKEN = "syncers-secret"').replace(
        "gpus = 2", 'gpus = 2\nenv = {WANDB = "gpus-$(secret)", HOME = "/h"}'
    )
    kubernetes.start(launched(tmp_path, text), tmp_path / "run")
    manifests = manifests_of(tmp_path / "run" / "kubernetes")
    plain = yaml.safe_dump_all(each for each in manifests if each["kind"] != "Secret")
    assert "syncers-secret" not in plain and "gpus-$" not in plain
    held = one(manifests, "Secret", "mine-gpu-env")
    learner = containers_of(pods_of(manifests)["mine-gpu"])["learner"]
    names = [each["name"] for each in learner["env"]]
    assert len(set(names)) == len(names), "each is said once"
    told = {
        each["name"]: each["valueFrom"]["secretKeyRef"] for each in learner["env"] if each["name"] in ("WANDB", "HOME")
    }
    assert {each["name"] for each in told.values()} == {held["metadata"]["name"]}
    assert {key: base64.b64decode(held["data"][ref["key"]]).decode() for key, ref in told.items()} == {
        "WANDB": "gpus-$(secret)", "HOME": "/h",
    }  # fmt: skip


def test_nobody_dials_a_learner_but_its_own_machines_nor_the_syncer_but_pods_of_the_launch(written):
    manifests = manifests_of(written / "kubernetes")
    labels = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in manifests
        if each["kind"] in ("StatefulSet", "Job")
    }
    stranger = {key: value for key, value in labels["mine-gpu"].items() if key != "skerry/launch"}
    everybody = labels | {"stranger": stranger}
    ours = ("mine-gpu", "mine-wide-0", "mine-wide-1", "mine-once")
    let_in = {
        name: {other for other in everybody if may_dial(manifests, everybody, other, name, 7077)} for name in labels
    }
    assert let_in == {
        "mine-syncer": {"mine-syncer", *ours}, "mine-gpu": set(), "mine-once": set(),
        "mine-wide-0": {"mine-wide-0"}, "mine-wide-1": {"mine-wide-1"},
    }  # fmt: skip
    assert may_dial(manifests, everybody, "mine-wide-0", "mine-wide-0", 29400)
    assert not may_dial(manifests, everybody, "mine-gpu", "mine-syncer", 8080)


def may_dial(manifests, labels, who, whom, port):
    """As Kubernetes has it: a pod that is in any policy takes what one of those lets in, and nothing else."""
    policies = [each["spec"] for each in manifests if each["kind"] == "NetworkPolicy"]
    about = [each for each in policies if each["podSelector"]["matchLabels"].items() <= labels[whom].items()]
    assert about and all(each["policyTypes"] == ["Ingress"] for each in about)
    return any(
        source["podSelector"]["matchLabels"].items() <= labels[who].items()
        for each in about
        for rule in each["ingress"]
        if port in [allowed["port"] for allowed in rule.get("ports", [{"port": port}])]
        for source in rule["from"]
    )


def test_an_island_is_what_its_table_says(written):
    manifests = manifests_of(written / "kubernetes")
    job = one(manifests, "Job", "mine-gpu")["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    pod = job["template"]["spec"]
    learner = containers_of(pod)["learner"]
    assert learner["command"] == ["python", "train.py", "--out=$$(HOME)"] and learner["workingDir"] == "/work"
    assert learner["resources"]["limits"] == {"memory": "16384Mi", "nvidia.com/gpu": "2"}
    env = {each["name"]: each.get("value") for each in learner["env"]}
    assert env["SKERRY_NAME"] == "gpu-$(JOB_COMPLETION_INDEX)" and next(iter(env)) == "JOB_COMPLETION_INDEX"
    assert env["SKERRY_SYNCER"] == "mine-syncer.training.svc:7077"
    assert pod["nodeSelector"] == {"zone": "a", "kind": "l4"}
    assert {"nvidia.com/gpu", "cloud.google.com/gke-spot"} <= {each["key"] for each in pod["tolerations"]}
    assert one(manifests, "Job", "mine-once")["spec"]["backoffLimitPerIndex"] == 0
    wide = one(manifests, "Job", "mine-wide-1")["spec"]
    assert wide["completions"] == 2
    words = containers_of(wide["template"]["spec"])["learner"]["command"]
    meeting = ["--rdzv-backend", "static", "--nnodes", "2", "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    meeting += ["--master-addr", "mine-wide-1-0.mine-wide", "--master-port", "29400"]
    assert words[4 : 4 + len(meeting)] == meeting, "torchrun's other rendezvous unpickles what it finds"
    assert one(manifests, "Service", "mine-wide")["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("word", ["$(HOME)", "$$(HOME)", "$$$(HOME)", "a$$b", "cost: $5", "$", "$("])
def test_dollars_are_dollars_in_commands_and_values(tmp_path, word):
    text = EVERYTHING.replace("--out=$(HOME)", word).replace('folder = "/work"', f'folder = "/work"\ndata = "{word}"')
    kubernetes.start(launched(tmp_path, text), tmp_path / "run")
    learner = containers_of(pods_of(manifests_of(tmp_path / "run" / "kubernetes"))["mine-gpu"])["learner"]
    assert expanded(learner["command"][-1]) == word
    assert expanded(next(each["value"] for each in learner["env"] if each["name"] == "SKERRY_DATA")) == word


def expanded(text):
    """As Kubernetes does: two dollars are one, and a name in brackets behind one is a variable."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda found: "$" if found[0] == "$$" else f"<{found[1]}>", text)


def test_a_launch_again_has_the_same_keys_and_the_same_volume(tmp_path, written):
    before = manifests_of(written / "kubernetes")
    kubernetes.start(launched(tmp_path), written)
    assert manifests_of(written / "kubernetes") == before
    kubernetes.start(launched(tmp_path), tmp_path / "other")
    claims = [
        one(manifests_of(root / "kubernetes"), "StatefulSet", "mine-syncer")["spec"]["volumeClaimTemplates"][0]
        for root in (written, tmp_path / "other")
    ]
    assert claims[0]["metadata"]["name"] != claims[1]["metadata"]["name"], "no other launch goes on with its volume"


def test_a_dry_run_prints_all_and_touches_nothing(tmp_path, capsys):
    launch = launched(tmp_path)
    text = kubernetes.dry(launch, tmp_path / "run")
    assert len([*yaml.safe_load_all(text)]) > 8
    assert "hold keys" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('name = "mine"', 'name = "7b"'), "run.name = '7b': Kubernetes wants a letter"),
        (("memory_gib = 4", 'dir = "/data"'), "syncer.dir: on Kubernetes the run directory is /skerry/run"),
        (("memory_gib = 4", 'genesis = "g.safetensors"'), "is a path in the learners' image"),
        (('where = "pool=stable"', 'where = "stable"'), "write labels of nodes, KEY=VALUE"),
        (('namespace = "training"', 'namespace = "Training"'), "kubernetes.namespace = 'Training'"),
        (('namespace = "training"', 'volume = "much"'), "kubernetes.volume = 'much': write a size"),
        (('namespace = "training"', "grace_s = 3"), "kubernetes.grace_s = 3: must be from 10"),
        (('image = "registry.example/skerry:1"', 'image = ""'), "kubernetes.image = '': name an image"),
        (("gpus = 2", "gpus = 0.5"), "island gpu: gpus = 0.5: Kubernetes gives whole GPUs"),
        (('folder = "/work"', 'folder = "work"'), "island gpu: folder = 'work': on Kubernetes it is a path in"),
        (('restart = "never"', 'restart = "always"'), 'island once: restart = "always": a Job brings back'),
    ],
)
def test_what_kubernetes_cannot_do_is_said_before_anything_is_written(tmp_path, capsys, change, said):
    assert change[0] in EVERYTHING
    (tmp_path / "run.toml").write_text(EVERYTHING.replace(*change, 1))
    code, out, err = called(
        capsys, "launch", tmp_path / "run.toml", "--engine", "kubernetes", "--run", tmp_path / "run"
    )
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_names_that_are_too_long_together_are_refused(tmp_path):
    text = EVERYTHING.replace('"mine"', f'"{"m" * 40}"').replace('"wide"', '"wideisland"')
    (tmp_path / "run.toml").write_text(text)
    (said,) = kubernetes.problems(spec.read(tmp_path / "run.toml"))
    assert (
        said == "island wideisland: its name and the run's are too long for a Job's: shorten one of them by 3 letters"
    )


# ------------------------------------------------------------------------------- their commands, as processes here


TINY = """
[run]
name = "tiny"
steps = 40
gather_s = 20

[model]
layers = 1
width = 32
heads = 2
context = 32

[data]
batch = 2

[[islands]]
name = "plain"
count = 2
cpus = 0.5
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first start on a machine compiles kernels
def test_what_the_manifests_say_is_a_run_from_its_first_values_to_its_end(tmp_path):
    """In the order of a pod: what runs before, then the syncer, then two learners; then the syncer's pod stays."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = TINY + f"\n[syncer]\nport = {port}\n"
    kubernetes.start(launched(tmp_path, text), tmp_path / "run")
    here = Here(tmp_path, manifests_of(tmp_path / "run" / "kubernetes"), port)
    syncer = containers_of(pods_of(here.manifests)["tiny-syncer"])
    for first in ("look", "genesis", "keys"):
        here.run(syncer[first])
    made = here.root / "made" / "genesis.safetensors"
    made.unlink()
    for again in ("look", "genesis"):
        here.run(syncer[again])
    assert not made.exists(), "the volume has first values: none are made at the next start"
    assert sorted(path.name for path in (here.root / "skerry/run/keys").iterdir()) == [
        "admin.pem", "issued.json", "syncer.pem",
    ]  # fmt: skip
    serving = here.begin(syncer["syncer"])
    try:
        here.until(lambda: here.probe(syncer, "startupProbe"), serving)
        learner = containers_of(pods_of(here.manifests)["tiny-plain"])
        pods = []
        for index in ("0", "1"):
            here.run(learner["key"], index)
            pods.append(here.begin(learner["learner"], index))
        here.until(lambda: here.probe(syncer, "livenessProbe"), serving)
        assert [pod.wait(300) for pod in pods] == [0, 0]
        here.until((here.root / "tmp/ended").exists, serving)
        assert here.probe(syncer, "livenessProbe") and here.probe(syncer, "startupProbe")
        assert serving.poll() is None, "its volume can be reached"
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(30) == 0
    finally:
        serving.kill()
    done = subprocess.run(
        [sys.executable, "-m", "skerry", "status", here.root / "skerry/run", "--json"], capture_output=True, check=True
    )
    status = json.loads(done.stdout)
    assert status["phase"] == "closed" and status["learners"].keys() == {"plain-0", "plain-1"}


class Here:
    """A pod's containers as processes of this machine: its folders lie below one of the test's."""

    FOLDERS = re.compile(r"(?<![\w/])(/etc/skerry-keys|/etc/skerry|/skerry|/private|/made|/tmp)\b")

    def __init__(self, root, manifests, port):
        self.root, self.manifests, self.address = root / "pod", manifests, f"127.0.0.1:{port}"
        for name in ("etc/skerry-keys", "etc/skerry", "skerry", "private", "made", "tmp"):
            (self.root / name).mkdir(parents=True)
        self._fill("etc/skerry", self._secret("tiny-settings"))
        self._fill("etc/skerry-keys", self._secret("tiny-syncer-keys"))

    def _secret(self, name):
        data = one(self.manifests, "Secret", name)["data"]
        return {file: base64.b64decode(content).decode() for file, content in data.items()}

    def _fill(self, folder, files):
        for name, text in files.items():
            (self.root / folder / name).write_text(text)

    def _here(self, word):
        return self.FOLDERS.sub(lambda found: f"{self.root}{found[0]}", word)

    def begin(self, container, index=None):
        """`index` is the pod's own; both pods of learners have this machine's folders, so their keys' names differ."""
        env = {each["name"]: self._here(each.get("value") or index or "") for each in container["env"]}
        env = {name: value.replace("$(JOB_COMPLETION_INDEX)", str(index)) for name, value in env.items()}
        env |= {"SKERRY_SYNCER": self.address, "SKERRY_KEY_FILE": f"{self.root}/private/{index}.key"} if index else {}
        env |= {"PATH": PATH, "HOME": str(Path.home())}
        env.pop("NUMBA_CACHE_DIR", None)  # this machine's own: nothing is compiled again
        words = [self._here(word) for word in container["command"]]
        if container["name"] == "key":
            own = self._secret("tiny-plain-keys")[f"{env['SKERRY_NAME']}.key"]
            self._fill("etc/skerry-keys", {"learner.key": own})  # as subPathExpr mounts it
            words[-1] = env["SKERRY_KEY_FILE"]
        return subprocess.Popen(words, env=env, cwd=self.root)

    def run(self, container, index=None):
        assert self.begin(container, index).wait(300) == 0

    def probe(self, containers, kind):
        words = [self._here(word) for word in containers["syncer"][kind]["exec"]["command"]]
        return subprocess.run(words, capture_output=True, env={"PATH": PATH}, check=False).returncode == 0

    def until(self, holds, process, limit_s=300.0):
        deadline = time.monotonic() + limit_s
        while not holds():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)


def test_a_syncer_that_fails_takes_its_pod_along_and_one_that_is_told_to_end_does_so(tmp_path):
    words = [sys.executable, "-m", "skerry.engines.pod", tmp_path / "ended"]
    assert subprocess.run([*words, "sh", "-c", "exit 75"], check=False).returncode == 75
    assert subprocess.run([*words, "sh", "-c", "kill -9 $$"], check=False).returncode == 137
    polite = "import signal; signal.signal(15, lambda *_: exit(0)); print('up', flush=True); signal.pause()"
    with subprocess.Popen([*words, sys.executable, "-c", polite], stdout=subprocess.PIPE) as pod:
        assert pod.stdout.readline() == b"up\n"
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(30) == 0
    assert not (tmp_path / "ended").exists()


# ------------------------------------------------------------------------------------------------------- kubectl


STAND_IN = """#!{python}
import json, pathlib, sys
root = pathlib.Path({root!r})
words = sys.argv[1:]
given = sys.stdin.read() if "exec" in words else ""
with open(root / "asked.jsonl", "a") as file:
    file.write(json.dumps([words, given]) + "\\n")
if (root / "trouble").exists():
    sys.exit((root / "trouble").read_text())
if "exec" in words and (root / "no-exec").exists():
    sys.exit("pod not found")
if "get" in words:
    print((root / "items.json").read_text())
if "logs" in words:
    print("the log of", words[words.index("logs") + 1], *words[words.index("-c") + 2:])
"""


class Cluster:
    """What a stand-in for kubectl answers, and what it was asked."""

    def __init__(self, root, record):
        self.root, self.record = root, record
        self.answer([])

    def answer(self, items):
        (self.root / "items.json").write_text(json.dumps({"items": items}))

    def asked(self):
        file = self.root / "asked.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        file.unlink(missing_ok=True)
        assert all(words[0] == "--namespace=training" for words, _ in found)
        return [(words[1:], given) for words, given in found]

    def pod(self, name, job, index, phase, *, at="2026-01-01T00:00:00Z", node="node-1", **status):
        about = {"name": name, "creationTimestamp": at, "labels": {"job-name": job}}
        about["labels"] |= {"app.kubernetes.io/component": "learner" if job else "syncer"}
        about["annotations"] = {"batch.kubernetes.io/job-completion-index": str(index)} if job else {}
        return {"kind": "Pod", "metadata": about, "spec": {"nodeName": node}, "status": {"phase": phase, **status}}

    def job(self, name, **status):
        labels = {"skerry/island": name.split("-")[1]}
        return {"kind": "Job", "metadata": {"name": name, "labels": labels}, "status": status}


def status_of(name, ready=True, restarts=0, **state):
    return [{"name": name, "ready": ready, "restartCount": restarts, "state": state or {"running": {}}}]


STATEFUL = {"kind": "StatefulSet", "metadata": {"name": "mine-syncer"}}


@pytest.fixture
def cluster(written, tmp_path, monkeypatch):
    root = tmp_path / "stand-in"
    root.mkdir()
    (root / "kubectl").write_text(STAND_IN.format(python=sys.executable, root=str(root)))
    (root / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")
    return Cluster(root, folder.read(written))


def called(capsys, *words):
    with pytest.raises(SystemExit) as end:
        cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


def test_ps_says_of_each_learner_how_it_does(cluster, capsys, written):
    error = {"terminated": {"exitCode": 1, "reason": "Error", "message": "Traceback\nValueError: no data\n"}}
    unfit = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/4 nodes are available: Insufficient nvidia.com/gpu",
    }
    cluster.answer([
        STATEFUL,
        cluster.pod("mine-syncer-0", "", 0, "Running", containerStatuses=status_of("syncer", restarts=2)),
        cluster.job("mine-gpu"),
        cluster.pod("mine-gpu-0-a", "mine-gpu", 0, "Failed", containerStatuses=status_of("learner", False, **error)),
        cluster.pod("mine-gpu-0-b", "mine-gpu", 0, "Running", at="2026-01-02T00:00:00Z", node="node-2",
                    containerStatuses=status_of("learner")),
        cluster.pod("mine-gpu-1-a", "mine-gpu", 1, "Failed", containerStatuses=status_of("learner", False, **error)),
        cluster.pod("mine-gpu-2-a", "mine-gpu", 2, "Pending", node="", conditions=[unfit]),
        cluster.job("mine-wide-0"),
        cluster.pod("mine-wide-0-0-a", "mine-wide-0", 0, "Running", containerStatuses=status_of("learner")),
        cluster.pod("mine-wide-0-1-a", "mine-wide-0", 1, "Pending", node="node-3",
                    containerStatuses=status_of("learner", False, waiting={"reason": "ContainerCreating"})),
        cluster.job("mine-once", failedIndexes="0"),
    ])  # fmt: skip
    code, out, _ = called(capsys, "ps", written, "--json")
    members = {each["name"]: each for each in json.loads(out)["members"]}
    assert code == 0 and next(iter(members)) == "syncer"
    seen = {name: (each["state"], each["restarts"], each["where"]) for name, each in members.items()}
    assert seen == {
        "syncer": ("running", 2, "node-1"),
        "gpu-0": ("running", 1, "node-2"),
        "gpu-1": ("restarting", 0, "node-1"),
        "gpu-2": ("waiting", 0, ""),
        "wide-0": ("starting", 0, "node-1, node-3"),
        "wide-1": ("ended", 0, ""),
        "once-0": ("failed", 0, ""),
    }
    assert members["gpu-1"]["detail"] == "exit code 1: ValueError: no data"
    assert members["gpu-2"]["detail"].endswith("Insufficient nvidia.com/gpu")


def test_a_run_that_is_closed_is_shown_as_ended(cluster):
    jobs = [cluster.job(name, completedIndexes=done) for name, done in (
        ("mine-gpu", "0-2"), ("mine-wide-0", "0,1"), ("mine-wide-1", "0,1"), ("mine-once", "0"),
    )]  # fmt: skip
    syncer = cluster.pod("mine-syncer-0", "", 0, "Running", containerStatuses=status_of("syncer", ready=False))
    cluster.answer([STATEFUL, syncer, *jobs])
    assert {member.state for member in kubernetes.members(cluster.record)} == {"ended"}
    cluster.answer([STATEFUL, syncer, *jobs[:-1], cluster.job("mine-once")])
    assert next(member.state for member in kubernetes.members(cluster.record)) == "starting"


def test_logs_are_of_every_life_that_the_cluster_knows(cluster):
    cluster.answer([
        STATEFUL,
        cluster.pod("mine-syncer-0", "", 0, "Running", containerStatuses=status_of("syncer", restarts=1)),
        cluster.job("mine-gpu"),
        cluster.pod("second", "mine-gpu", 1, "Running", at="2026-01-02T00:00:00Z"),
        cluster.pod("first", "mine-gpu", 1, "Failed"),
        cluster.pod("other", "mine-gpu", 0, "Running"),
    ])  # fmt: skip
    assert list(kubernetes.logs(cluster.record, "gpu-1", False)) == ["the log of first", "the log of second"]
    assert list(kubernetes.logs(cluster.record, "gpu-1", True))[-1] == "the log of second -f"
    assert list(kubernetes.logs(cluster.record, "syncer", False)) == [
        "the log of mine-syncer-0 --previous", "the log of mine-syncer-0",
    ]  # fmt: skip
    with pytest.raises(Refusal, match="no 'gpu-9' in this run: did you mean gpu-"):
        list(kubernetes.logs(cluster.record, "gpu-9", False))
    with pytest.raises(Refusal, match="once-0: has no pod in the cluster at present"):
        list(kubernetes.logs(cluster.record, "once-0", False))


def test_an_island_grows_by_learners_whose_keys_the_syncer_knows_first(cluster, capsys, written):
    cluster.answer([STATEFUL, cluster.job("mine-gpu")])
    before = one(manifests_of(written / "kubernetes"), "Job", "mine-gpu")["spec"]
    keys = {file.name: file.read_bytes() for file in (written / "learner-keys").iterdir()}
    assert called(capsys, "scale", written, "gpu", "5")[0] == 0
    after = one(manifests_of(written / "kubernetes"), "Job", "mine-gpu")["spec"]
    assert (after.pop("completions"), after.pop("parallelism")) == (5, 5)
    assert after == {key: value for key, value in before.items() if key not in ("completions", "parallelism")}
    now = {file.name: file.read_bytes() for file in (written / "learner-keys").iterdir()}
    assert now.keys() - keys.keys() == {"gpu-3.key", "gpu-4.key"} and now.items() >= keys.items()
    asked = cluster.asked()[1:]
    assert [words[0] for words, _ in asked] == ["apply", "exec", "apply"]
    assert asked[0][0][-1].endswith("10-secrets.yaml") and asked[2][0][-1].endswith("30-gpu.yaml")
    book = json.loads(asked[1][1])
    assert {"gpu-3", "gpu-4"} <= {row["name"] for row in book}
    assert folder.read(written).counts["gpu"] == 5


def test_an_island_shrinks_by_its_last_learners_and_to_none(cluster, capsys, written):
    cluster.answer([STATEFUL, cluster.job("mine-wide-0"), cluster.job("mine-wide-1"), cluster.job("mine-gpu")])
    assert called(capsys, "scale", written, "wide", "1")[0] == 0
    deleted = next(words for words, _ in cluster.asked() if words[0] == "delete")
    assert deleted[1:3] == ["job", "mine-wide-1"]
    assert called(capsys, "scale", written, "gpu", "0")[0] == 0
    asked = [words for words, _ in cluster.asked()]
    assert asked[-1][:3] == ["delete", "job", "mine-gpu"], "a Job of no learners would have ended for good"


def test_a_revoked_key_is_handed_to_the_syncer_and_not_made_again(cluster, capsys, written):
    cluster.answer([STATEFUL, cluster.job("mine-gpu")])
    assert called(capsys, "keys", "revoke", written, "gpu-1")[0] == 0
    assert called(capsys, "scale", written, "gpu", "3")[0] == 0
    (book,) = [json.loads(given) for words, given in cluster.asked() if words[0] == "exec"]
    assert [bool(row.get("revoked")) for row in book if row["name"] == "gpu-1"] == [True]


def test_what_the_syncer_did_not_hear_of_is_not_begun(cluster, capsys, written):
    cluster.answer([STATEFUL, cluster.job("mine-gpu")])
    (cluster.root / "no-exec").touch()
    code, _, err = called(capsys, "scale", written, "gpu", "4")
    assert code == 2 and "pod not found" in err and folder.read(written).counts["gpu"] == 3
    assert [words[0] for words, _ in cluster.asked()] == ["get", "apply", "exec"]
    (cluster.root / "no-exec").unlink()
    assert called(capsys, "scale", written, "gpu", "4")[0] == 0 and folder.read(written).counts["gpu"] == 4


def test_down_ends_learners_first_and_leaves_the_volume(cluster, capsys, written):
    assert called(capsys, "down", written)[0] == 0
    asked = [words for words, _ in cluster.asked()[1:]]
    label = f"skerry/launch={cluster.record.handle['id']}"
    assert [words[1] for words in asked] == ["job", "statefulset", "networkpolicy,poddisruptionbudget,service,secret"]
    assert all(words[0] == "delete" and label in words and "--cascade=foreground" in words for words in asked)
    assert "--timeout=180s" in asked[0] and "--timeout=150s" in asked[1]


def test_what_kubectl_cannot_do_is_one_line(cluster, capsys, written, monkeypatch):
    (cluster.root / "trouble").write_text("warning\nThe connection to the server was refused")
    code, out, err = called(capsys, "ps", written)
    assert (code, out) == (2, "")
    assert err == "skerry: kubectl get: The connection to the server was refused\n"
    (cluster.root / "trouble").unlink()
    (cluster.root / "items.json").write_text("no objects")
    assert "its answer is no list of objects" in called(capsys, "ps", written)[2]
    monkeypatch.setenv("PATH", "/nowhere")
    code, out, err = called(capsys, "down", written)
    assert (code, out) == (2, "") and err.startswith(
        "skerry: kubectl is not on the PATH: install it, or run where it is: "
    )
    assert "kubectl --namespace=training get" in err and err.count("\n") == 1


def test_scaling_what_is_not_there_is_refused(cluster, capsys, written):
    code, _, err = called(capsys, "scale", written, "gpu", "5")
    assert code == 2 and "nothing of it is in the cluster" in err
    assert folder.read(written).counts["gpu"] == 3
