"""A plain DDP run under faults: what is measured of it, and that nothing of it is left behind."""

import os
import subprocess
import sys

import pytest

from skerry import config as configs
from skerry.proof.chaos import ddp, ddp_net

pytestmark = pytest.mark.chaos

CONFIG = configs.resolve(configs.local(), None, [("model.preset", "tiny"), ("learner.step_s", 0.1)])
SERVER = "import socket; s = socket.create_server(('10.77.0.1', 7000)); print(flush=True); print(s.accept()[0].recv(9))"
CLIENT = "import socket; socket.create_connection(('10.77.0.1', 7000)).sendall(b'hello')"


def children():
    """Processes whose parent is this one."""
    ps = subprocess.Popen(["ps", "-eo", "pid=,ppid="], stdout=subprocess.PIPE, text=True)
    pairs = [tuple(map(int, line.split())) for line in ps.communicate()[0].splitlines()]
    return {pid for pid, parent in pairs if parent == os.getpid()} - {ps.pid}


def measure(fault, **options):
    return ddp.measure(CONFIG, fault, learners=2, seconds=2.0, warm_s=0.3, **options)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = children()
    yield
    assert children() <= before
    assert not list(tmp_path.iterdir())


def test_no_step_is_completed_once_a_rank_is_killed():
    result = measure(ddp.FAILED_LEARNER)
    assert result.measured, result.why_not
    assert result.rate_before > 0 and result.rate_during == 0.0
    assert "rank 1 killed; rank 0" in result.what_happened


def test_a_throttled_rank_slows_everybody_down():
    result = measure(ddp.THROTTLING)
    assert result.measured, result.why_not
    assert 0.0 < result.rate_during < 0.5 * result.rate_before
    assert not result.is_bound


def test_an_interrupt_ends_every_rank():
    found = set()

    def interrupt(text):
        if "undisturbed" in text:
            found.update(children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(ddp.FAILED_LEARNER, show=interrupt)
    assert len(found) >= 2


@pytest.mark.skipif(ddp_net.why_not() is not None, reason="needs network namespaces")
def test_an_interrupt_ends_the_network():
    found = set()

    def interrupt(text):
        found.update(children())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(ddp.WAN, show=interrupt)
    assert len(found) >= 5  # two ranks, their namespaces, the bridge


def test_ranks_that_cannot_run_are_the_reason_why_nothing_was_measured(tmp_path):
    config = configs.resolve(CONFIG, None, [("data.path", str(tmp_path / "nowhere"))])
    result = ddp.measure(config, ddp.FAILED_LEARNER, learners=2)
    assert not result.measured
    assert result.why_not.startswith("not measured here: rank ") and "nowhere does not exist" in result.why_not


def test_throttling_needs_a_pace():
    free = configs.resolve(CONFIG, None, [("learner.step_s", 0.0)])
    with pytest.raises(configs.ConfigError, match=r"learner\.step_s = 0"):
        ddp.measure(free, ddp.THROTTLING)


def test_the_step_in_flight_at_the_fault_counts_for_nothing():
    in_flight, later = ddp.Step(101.0, 50), ddp.Step(103.0, 50)
    assert ddp.stalled_rate([in_flight], 50, 100.0, 110.0, are_all_running=False) == (0.0, False)
    assert ddp.stalled_rate([in_flight, later], 50, 100.0, 110.0, are_all_running=False) == (5.0, False)


def test_a_step_in_progress_gives_an_upper_bound():
    assert ddp.stalled_rate([], 50, 100.0, 110.0, are_all_running=True) == (5.0, True)
    steps = [ddp.Step(101.0, 50), ddp.Step(104.0, 50)]
    assert ddp.stalled_rate(steps, 50, 100.0, 111.0, are_all_running=True) == (10.0, True)


# ---------------------------------------------------------------------------------------------- the slow network


def test_the_probe_gives_one_plain_line_or_none():
    reason = ddp_net.why_not()
    assert reason is None or (reason and "\n" not in reason)


def test_a_missing_tool_is_named(monkeypatch, tmp_path):
    with monkeypatch.context() as bare:
        bare.setenv("PATH", str(tmp_path))
        bare.setattr(ddp_net, "SBIN", str(tmp_path))
        assert ddp_net.why_not() == "there is no 'ip' on this machine; install iproute2"
        assert measure(ddp.WAN).why_not == "not measured here: there is no 'ip' on this machine; install iproute2"


@pytest.mark.skipif(ddp_net.why_not() is not None, reason="needs network namespaces")
def test_ranks_reach_each_other_over_links_that_can_be_slowed_down():
    def qdisc(network, rank):
        command = [*network.inside(rank), ddp_net._tool("tc"), "qdisc", "show", "dev", ddp_net.INTERFACE]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with ddp_net.Network(2) as network:
        assert "tbf" not in qdisc(network, 0)
        network.slow_down()
        assert all("tbf" in qdisc(network, rank) and "rate 2Mbit" in qdisc(network, rank) for rank in (0, 1))
        server = subprocess.Popen([*network.inside(0), sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
        server.stdout.readline()
        subprocess.run([*network.inside(1), sys.executable, "-c", CLIENT], check=True, timeout=10)
        assert b"hello" in server.communicate(timeout=10)[0]
