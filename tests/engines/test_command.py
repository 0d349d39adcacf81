"""How the workers of one learner find each other: real torchruns, with the words that every engine gives them."""

import os
import signal
import subprocess
import sys

import pytest

from e2e.processes import until
from skerry.engines.alone import free_port
from skerry.engines.command import learner_argv, meeting
from skerry.engines.spec import Island

pytestmark = pytest.mark.timeout(180)

WORKER = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
said, count = torch.ones(1), 0
while count == 0 or "stay" in sys.argv:
    dist.all_reduce(said.fill_(1.0))
    count += 1
    if count == 1:
        told = [said.item(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.getpid()]
        Path(sys.argv[1], f"worker-{dist.get_rank()}.tmp").write_text(" ".join(map(str, told)))
        Path(sys.argv[1], f"worker-{dist.get_rank()}.tmp").rename(Path(sys.argv[1], f"worker-{dist.get_rank()}"))
dist.barrier()
dist.destroy_process_group()
"""
HELPED = """
import os, sys
from pathlib import Path
import helper

said = f"{helper.FOUND} {os.environ.get('PYTHONSAFEPATH')}"
Path(sys.argv[1], f"helped-{os.environ['RANK']}").write_text(said)
"""


def island(tmp_path, *words, **numbers):
    (tmp_path / "worker.py").write_text(WORKER)
    return Island(name="pair", command=["python", "worker.py", str(tmp_path), *words], **numbers)


def begun(tmp_path, argv, at=0):
    with open(tmp_path / f"log-{at}", "wb") as log:
        env = os.environ | {"LOGLEVEL": "INFO", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=log, stderr=log)


def log_of(tmp_path, at):
    return (tmp_path / f"log-{at}").read_text()


def told(tmp_path):
    return [(tmp_path / f"worker-{rank}").read_text().split() for rank in (0, 1)]


def test_workers_of_one_machine_meet_without_a_pickle_at_a_port_of_each_start(tmp_path):
    """torchrun's rendezvous c10d, which --standalone is, unpickles what anybody has put into its store."""
    argv = learner_argv(island(tmp_path, workers=2), sys.executable)
    ports = set()
    for life in (0, 1):
        assert begun(tmp_path, argv, life).wait(120) == 0, (tmp_path / f"log-{life}").read_text()
        log = (tmp_path / f"log-{life}").read_text()
        assert "rdzv_backend             : static" in log and "c10d_rendezvous" not in log
        (total, host, port, _), other = told(tmp_path)
        assert (total, host) == ("2.0", "127.0.0.1") and other[2] == port
        ports.add(port)
    assert len(ports) == 2, "who comes back does not wait for a port to be free again"


def test_torchrun_imports_nothing_from_where_it_begins_and_a_script_what_lies_beside_it(tmp_path):
    """The folder of a command may be one that others write; that of its script is the user's own."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "helper.py").write_text("FOUND = 'helper'\n")
    (code / "train.py").write_text(HELPED)
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w'); raise ImportError('planted')\n")
    told = Island(name="pair", command=["python", "code/train.py", str(tmp_path)], workers=2)
    port = str(free_port())
    for at, met in enumerate(([], meeting(1, "0", "127.0.0.1", port))):
        assert begun(tmp_path, learner_argv(told, sys.executable, met), at).wait(120) == 0, log_of(tmp_path, at)
        assert not (tmp_path / "imported").exists()
        for rank in (0, 1):
            assert (tmp_path / f"helped-{rank}").read_text() == "helper None"
            (tmp_path / f"helped-{rank}").unlink()


def test_machines_meet_by_rank_without_a_pickle_and_a_killed_worker_ends_them_all(tmp_path):
    pair = island(tmp_path, "stay", machines=2)
    port = str(free_port())
    machines = [
        begun(tmp_path, learner_argv(pair, sys.executable, meeting(2, rank, "127.0.0.1", port)), rank) for rank in "01"
    ]
    try:
        until((tmp_path / "worker-0").exists, "the first machine's worker")
        until((tmp_path / "worker-1").exists, "the second machine's worker")
        assert {tuple(words[:3]) for words in told(tmp_path)} == {("2.0", "127.0.0.1", port)}
        os.kill(int(told(tmp_path)[1][3]), signal.SIGKILL)
        assert [machine.wait(120) for machine in machines] == [1, 1]
    finally:
        for machine in machines:
            machine.kill()
    assert all("rdzv_backend             : static" in (tmp_path / f"log-{rank}").read_text() for rank in "01")
