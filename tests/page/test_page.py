"""The page over real runs: it says what the run says, follows what changes, and lets in whom it should."""

import contextlib
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.processes import (
    WAIT_S,
    Puppet,
    Syncer,
    is_hung_up,
    is_running,
    processes_naming,
    secret,
    skerry,
    stranger,
    until,
)
from page.pages import Dashboard, Viewer, asked
from skerry.page.guard import HEADERS
from skerry.page.server import STATIC, VIEWERS_MAX

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def syncer(tmp_path):
    with Syncer(tmp_path) as syncer:
        yield syncer


@pytest.fixture
def run_dir(tmp_path):
    """A run that nobody serves any more: paused after a merge."""
    with Syncer(tmp_path) as syncer:
        with Puppet(syncer.port) as puppet:
            puppet.merge_once()
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 0
    return syncer.run_dir


def numbers(text):
    """Of /metrics, by name and labels."""
    families = text_string_to_metric_families(text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_what_it_shows_is_what_the_run_says(tmp_path, syncer):
    with Puppet(syncer.port) as puppet, Dashboard(tmp_path, syncer.run_dir) as page:
        for _ in range(3):
            puppet.merge_once()
        with Viewer(page.port) as viewer:
            viewer.until(lambda record: record["status"]["merges"] >= 3, "the merges to be shown")
            viewer.until(lambda record: record["history"]["t"] > 0, "the tape to be read")
        shown = page.run
        said = numbers(page.get("/metrics").text)
    assert shown["headline"]["mood"] == "training"
    assert shown["status"]["run"] == syncer.status["run"]
    assert shown["status"]["learners"]["puppet"]["state"] == "training"
    assert len(shown["history"]["rounds"]) == shown["status"]["merges"] == sum(shown["status"]["versions"])
    assert shown["history"]["learners"]["puppet"] == {
        "merged_share": 1.0, "participation": 1.0, "is_participating": True,
    }  # fmt: skip
    assert shown["history"]["ledger_balance"] == 0
    assert said["skerry_merges_total",] == shown["status"]["merges"]
    assert said["skerry_tokens_total", "merged"] == shown["status"]["tokens"]["merged"]
    assert said["skerry_learners", "training"] == 1
    assert said["skerry_quorum",] == 1


def test_an_open_page_is_told_what_changes_and_has_the_same_as_a_fresh_one(tmp_path, syncer):
    with Dashboard(tmp_path, syncer.run_dir) as page, Viewer(page.port) as viewer:
        assert viewer.take() == "whole"
        assert viewer.record["headline"]["word"] == "no learner yet"
        with Puppet(syncer.port) as puppet:
            puppet.merge_once()
            viewer.until(lambda record: record["status"]["merges"] == 1, "the merge to be shown")
        viewer.until(lambda record: record["status"]["learners"]["puppet"]["state"] == "lost", "the loss to be shown")
        assert "whole" not in viewer.kinds[1:]
        syncer.signal(signal.SIGTERM)
        viewer.until(lambda record: record["headline"]["mood"] == "paused", "the pause to be shown")
        with Viewer(page.port) as fresh:
            fresh.take()
            while viewer.number != fresh.number:
                min(viewer, fresh, key=lambda each: int(each.number.partition("-")[2])).take()
        assert viewer.record == fresh.record


def test_who_comes_back_is_sent_what_it_missed_or_the_whole(tmp_path, run_dir):
    with Dashboard(tmp_path, run_dir) as page:
        with Viewer(page.port) as viewer:
            viewer.take()
        with Viewer(page.port, since=viewer.number) as again:
            assert again.take() in ("beat", "change")
        for stale in (
            "",
            "00000000-1",
            "junk",
            viewer.number + "9" * 5000,
            "-",
            f"{viewer.number.partition('-')[0]}-²",
        ):
            with Viewer(page.port, since=stale.replace("²", "%C2%B2")) as other:
                assert other.take() == "whole"


def test_a_syncer_that_dies_and_comes_back_is_shown(tmp_path):
    with Syncer(tmp_path) as syncer, Dashboard(tmp_path, syncer.run_dir) as page, Viewer(page.port) as viewer:
        with Puppet(syncer.port) as puppet:
            puppet.merge_once()
        syncer.process.kill()
        viewer.until(lambda record: record["headline"]["mood"] == "died", "its death to be shown")
        with Syncer(tmp_path, run_dir=syncer.run_dir):
            viewer.until(lambda record: record["status"]["epoch"] == 2, "the next one to be shown")
            viewer.until(lambda record: record["headline"]["mood"] != "died", "the run to be served again")
        assert "restart" in [event["kind"] for event in viewer.record["history"]["events"]]


# ---------------------------------------------------------------------------------------------- who may look


@pytest.mark.parametrize(
    "path", ["/", "/api/run", "/metrics", "/static/main.js", "/static/vendor/uPlot.iife.min.js", "/no"]
)
def test_every_answer_has_the_strict_headers(page, path):
    answer = page.get(path)
    assert answer.status == (404 if path == "/no" else 200)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = answer.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "http" not in policy


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a run without learners."""
    folder = tmp_path_factory.mktemp("page")
    with Syncer(folder) as syncer, Dashboard(folder, syncer.run_dir) as page:
        yield page


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "localhost.evil"]
)
def test_names_of_others_that_lead_here_get_nothing(page, host):
    for path in ("/", "/api/run", "/metrics"):
        answer = page.get(path, Host=host)
        assert (answer.status, "skerry" in answer.text) == (421, False)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1", "127.0.0.1:80", "[::1]:4", "[::1]"])
def test_names_of_this_machine_are_answered_whatever_the_port(page, host):
    assert page.get("/api/run", Host=host).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(page, method):
    assert page.get("/api/run", method).status == 405


def test_no_file_but_its_own_is_served(page):
    for path in (
        "/static/../feed.py",
        "/static/%2e%2e/feed.py",
        "/static/..%2ffeed.py",
        "/static//etc/passwd",
        "/static/",
    ):
        assert page.get(path).status == 404


def test_beyond_this_machine_it_needs_a_token(tmp_path, run_dir):
    refused = skerry("dashboard", run_dir, "--http-host", "0.0.0.0")
    assert refused.returncode == 2
    assert "--http-token-file" in refused.stderr
    file = secret(tmp_path / "page.token", TOKEN)
    with Dashboard(tmp_path, run_dir, "--http-host", "0.0.0.0", "--http-token-file", file) as page:
        for path in ("/", "/api/run", "/api/events", "/metrics", "/static/main.js", "/?token=wrong"):
            answer = page.get(path, Host="gpu-box.example")
            assert (answer.status, answer.headers["X-Frame-Options"]) == (401, "DENY")
        entered = page.get(f"/?token={TOKEN}", Host="gpu-box.example")
        cookie = entered.headers["Set-Cookie"]
        assert (entered.status, entered.headers["Location"]) == (303, "/")
        assert {"HttpOnly", "SameSite=strict"} <= set(cookie.split("; "))
        assert TOKEN not in cookie
        assert page.get("/api/run", Cookie=cookie.partition(";")[0], Host="gpu-box.example").status == 200
        assert page.get("/metrics", Authorization=f"Bearer {TOKEN}").status == 200
        assert page.get("/metrics", Authorization="Bearer wrong").status == 401
        name = cookie.partition("=")[0]
        assert page.get("/api/run", Cookie=f"{name}=" + "0" * 64).status == 401
        assert TOKEN not in page.said
        assert page.get(f"//evil.example/?token={TOKEN}").headers["Location"] == "/"


def test_pages_of_one_host_keep_their_cookies_apart_and_none_opens_another(tmp_path, run_dir):
    """A browser sends every cookie of a host to each of its ports; also where both have the same token."""
    file, other_file = secret(tmp_path / "page.token", TOKEN), secret(tmp_path / "other.token", TOKEN[::-1])
    with contextlib.ExitStack() as stack:
        tokens = [(file, TOKEN), (file, TOKEN), (other_file, TOKEN[::-1])]
        folders = [tmp_path / str(number) for number in range(len(tokens))]
        for folder in folders:
            folder.mkdir()
        pages = [
            stack.enter_context(Dashboard(folder, run_dir, "--http-token-file", each))
            for folder, (each, _) in zip(folders, tokens, strict=True)
        ]
        said = [
            page.get(f"/?token={token}").headers["Set-Cookie"] for page, (_, token) in zip(pages, tokens, strict=True)
        ]
        assert all({"HttpOnly", "SameSite=strict", "Path=/"} <= set(each.split("; ")) for each in said)
        names, values = zip(*(each.partition(";")[0].split("=") for each in said), strict=True)
        assert len(set(names)) == len(set(values)) == len(pages)
        jar = "; ".join(["strange[]=1", *(each.partition(";")[0] for each in said)])
        for page, name in zip(pages, names, strict=True):
            assert page.get("/api/run", Cookie=jar).status == 200
            tried = [page.get("/api/run", Cookie=f"{name}={value}").status for value in values]
            assert sorted(tried) == [200, 401, 401]


def test_a_token_that_others_can_read_is_refused(tmp_path, run_dir):
    file = secret(tmp_path / "page.token", TOKEN)
    file.chmod(0o644)
    refused = skerry("dashboard", run_dir, "--http-token-file", file)
    assert refused.returncode == 2
    assert "chmod 600" in refused.stderr


def test_fifty_look_at_once_and_too_many_are_told_so(tmp_path, syncer):
    with Dashboard(tmp_path, syncer.run_dir) as page, contextlib.ExitStack() as stack:
        viewers = [stack.enter_context(Viewer(page.port)) for _ in range(50)]
        assert {viewer.take() for viewer in viewers} == {"whole"}
        with Puppet(syncer.port) as puppet:
            puppet.merge_once()
            for viewer in viewers:
                viewer.until(lambda record: record["status"]["merges"] == 1, "the merge to be shown to all")
        for _ in range(VIEWERS_MAX - len(viewers)):
            stack.enter_context(Viewer(page.port))
        told = page.get("/api/events")
        assert (told.status, f"{VIEWERS_MAX} pages" in told.text) == (503, True)
        assert page.get("/api/run").status == 200
        viewers[0].connection.close()
        viewers[0].response.close()
        until(lambda: _is_let_in(page.port), "the place of who left to be free")


def _is_let_in(port):
    with Viewer(port) as viewer:
        return viewer.response.status == 200


# ---------------------------------------------------------------------------------------------- the process


def test_a_directory_without_a_run_a_bad_port_and_one_that_is_taken_are_refused(tmp_path, run_dir):
    assert "is no run directory" in skerry("dashboard", tmp_path / "nothing").stderr
    for port in ("70000", "-1", "x", ""):
        said = skerry("dashboard", run_dir, f"--http-port={port}")
        assert (said.returncode, "must be from 0 to 65535" in said.stderr) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = skerry("dashboard", run_dir, "--http-port", taken.getsockname()[1])
    assert (said.returncode, "choose another port" in said.stderr) == (2, True)


def test_a_run_that_is_gone_is_said_and_a_run_that_comes_is_shown(tmp_path, run_dir):
    with Dashboard(tmp_path, run_dir) as page, Viewer(page.port) as viewer:
        viewer.until(lambda record: record["headline"]["mood"] == "paused", "the run to be shown")
        away = run_dir.rename(tmp_path / "elsewhere")
        viewer.until(lambda record: record["headline"]["mood"] == "empty", "its absence to be shown")
        assert str(run_dir) in viewer.record["trouble"]
        away.rename(run_dir)
        viewer.until(lambda record: record["headline"]["mood"] == "paused", "the run to be shown again")
        assert viewer.record["history"]["rounds"]


def test_the_page_beside_a_syncer_is_a_child_whose_death_harms_nobody(tmp_path):
    with Syncer(tmp_path, "--http-port", "0") as syncer:
        port = int(re.search(r"look at it: http://127\.0\.0\.1:(\d+)/", syncer.said)[1])
        until(lambda: asked(port).status == 200, "the page")
        (child,) = _pages(syncer.run_dir)
        os.kill(child, signal.SIGKILL)
        with Puppet(syncer.port) as puppet:
            puppet.merge_once()
        assert asked(port, "/api/run").status == 200  # at the same port, as soon as it is back
        (again,) = _pages(syncer.run_dir)
        assert again != child
        assert "the page ended (signal 9)" in syncer.said
        syncer.process.kill()
        syncer.wait()
        until(lambda: not is_running(again), "the page to end with its parent")


def test_the_page_ends_in_order_with_its_syncer(tmp_path):
    with Syncer(tmp_path, "--http-port", "0") as syncer:
        (child,) = until(lambda: _pages(syncer.run_dir), "the page")
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 0
    assert not is_running(child)
    assert "the page ended" not in syncer.said


def _pages(run_dir):
    return [pid for pid in processes_naming("dashboard") if pid in processes_naming(str(run_dir))]


def test_connections_that_ask_for_nothing_are_bounded(page):
    """Hundreds of them, and the page still answers others."""
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(contextlib.closing(stranger(page.port)))
        until(lambda: _answers(page), "the page to answer")


def _answers(page):
    try:
        return page.get("/api/run").status == 200
    except OSError:
        return False


@pytest.fixture
def guarded(tmp_path, run_dir):
    """A page that asks for its token."""
    file = secret(tmp_path / "page.token", TOKEN)
    with Dashboard(tmp_path, run_dir, "--http-token-file", file) as page:
        yield page


def _request(path="/api/run", *headers):
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]).encode()


BEARER = f"Authorization: Bearer {TOKEN}"


def test_strangers_who_begin_a_second_request_and_wait_keep_nobody_out(guarded):
    """Each is told that a token is needed, sends one byte more, and stays."""
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            connection = stack.enter_context(contextlib.closing(stranger(guarded.port)))
            with contextlib.suppress(ConnectionError):
                connection.sendall(_request())
                assert b" 401 " in connection.recv(64)
                connection.sendall(b"G")
        assert guarded.get("/api/run", Authorization=f"Bearer {TOKEN}").status == 200


def test_strangers_who_say_nothing_keep_nobody_out_and_viewers_keep_their_places(guarded):
    with contextlib.ExitStack() as stack:
        viewer = stack.enter_context(contextlib.closing(stranger(guarded.port)))
        viewer.sendall(_request("/api/events", BEARER))
        assert b" 200 " in viewer.recv(64)
        silent = [stack.enter_context(contextlib.closing(stranger(guarded.port))) for _ in range(300)]
        assert guarded.get("/api/run", Authorization=f"Bearer {TOKEN}").status == 200
        assert is_hung_up(silent[0])
        said = bytearray()
        until(lambda: said.extend(viewer.recv(1 << 16)) or said.count(b"event: ") > 1, "the viewer to be told more")


def test_viewers_who_never_read_keep_nobody_out(guarded):
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(contextlib.closing(_deaf(guarded.port)))
        assert guarded.get("/api/run", Authorization=f"Bearer {TOKEN}").status == 200


def test_who_begins_a_request_and_does_not_end_it_is_hung_up_on(page):
    with contextlib.closing(stranger(page.port)) as connection:
        connection.sendall(_request())
        assert b" 200 " in connection.recv(64)
        connection.sendall(b"G")
        assert is_hung_up(connection)


def test_who_does_not_take_in_what_it_asked_for_is_hung_up_on(guarded):
    before = _sockets(guarded)
    with contextlib.closing(_deaf(guarded.port)):
        until(lambda: _sockets(guarded) > before, "the connection to be taken")
        until(lambda: _sockets(guarded) == before, "the connection to be given up")


def _sockets(page):
    """That its process has open; who does not read cannot be told that it was hung up on."""
    sockets = 0
    for each in Path(f"/proc/{page.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the folder was read
            sockets += os.readlink(each).startswith("socket:")
    return sockets


def _deaf(port):
    """A connection that asks for more than a system keeps for who does not read, and does not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(WAIT_S)
    connection.connect(("127.0.0.1", port))
    with contextlib.suppress(ConnectionError):
        connection.sendall(_request("/static/vendor/uPlot.iife.min.js", BEARER) * 200)
    return connection


def test_what_strangers_say_makes_no_lines_in_the_log(guarded):
    chunked = _request("/", "Transfer-Encoding: chunked")
    upgrade = _request("/", "Connection: upgrade", "Upgrade: websocket")
    before = guarded.said
    for junk in (b"junk\r\n\r\n", chunked + b"junk\r\n", upgrade, _request("/static/%00", BEARER)):
        for _ in range(20):
            with contextlib.closing(stranger(guarded.port)) as connection:
                connection.sendall(junk)
                connection.shutdown(socket.SHUT_WR)
                assert is_hung_up(connection)
    assert guarded.said == before


@pytest.mark.parametrize(("path", "is_kept"), [("/", True), ("/api/run", True), ("/no", False), ("/?token=no", False)])
def test_only_who_looks_at_the_page_keeps_its_connection(guarded, path, is_kept):
    answer = guarded.get(path, **({} if "token" in path else {"Authorization": f"Bearer {TOKEN}"}))
    assert answer.headers["Connection"] == (None if is_kept else "close")


def test_nothing_on_the_page_is_made_of_text_that_could_be_markup():
    scripts = [file for file in STATIC.glob("*.js")]
    assert len(scripts) > 5
    for file in scripts:
        text = file.read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(|\.src\s*=", text
        )
