"""The pictures of the live page in docs/images, each of a real run: .venv/bin/python experiments/page_pictures.py

Needs Chromium and tmux (Debian: apt-get install chromium tmux) and pip install playwright. It takes about five minutes:
a demo with its kills, also as `skerry top` shows it, then 256 synthetic learners on a real syncer, as `skerry bench
syncer` has them. Pictures are made small by giving them 256 colours.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from skerry import algo
from skerry import config as configs
from skerry.engines.supervisor import LocalRun
from skerry.plan.layouts import even
from skerry.proof.bench.swarm import Swarm
from skerry.proof.bench.syncer import create

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT / "tests"))
from extras.browsers import browser  # noqa: E402

LAPTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
WAIT_S = 300.0
MANY = 256
BYTES_MAX = 300_000


def main():
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        demo(chromium, Path(folder) / "demo")
        many(chromium, Path(folder) / "many")


def demo(chromium, run_dir):
    """In mid-run, after a kill, on a phone and in the dark; then finished."""
    words = ["demo", "--out", run_dir, "--minutes", "2.5", "--run.evaluate_every", "0.1", "--kill-learner", "0.45"]
    with started(*words, "--kill-syncer", "0.6") as (process, port):
        until(lambda: record(port)["status"]["progress"] > 0.38, "the run to be under way")
        picture(chromium, port, "page", LAPTOP, full=True)
        until(lambda: "lost" in states(port), "a learner to be killed")
        picture(chromium, port, "page-killed", LAPTOP)
        terminal(chromium, run_dir, "top")
        until(lambda: record(port)["status"]["epoch"] == 2 and states(port) == {"training"}, "all to be back")
        until(lambda: record(port)["status"]["progress"] > 0.8, "the run to go on")
        picture(chromium, port, "page-dark", LAPTOP, full=True, color_scheme="dark")
        picture(chromium, port, "page-phone", PHONE)
        assert process.wait(WAIT_S) == 0
    with started("dashboard", run_dir) as (_, port):
        until(lambda: not record(port)["is_behind"], "the tape to be read")
        picture(chromium, port, "page-finished", LAPTOP, full=True)


def many(chromium, run_dir):
    """256 learners."""
    run = configs.Run(name="many", learners=MANY, minutes=60.0)
    sync = configs.Sync(policy="fixed", num_fragments=12, sync_every=4, fragment_sync_delay=2)
    config, layout = configs.validate(configs.Config(run=run, sync=sync)), even(24_000, 12)
    algo.warm_up()
    create(run_dir, config, layout)
    local = LocalRun(run_dir, [], [])
    with local.ends_everything():
        local.start_syncer()
        with contextlib.closing(Swarm(local.port, config, layout, 3.0, MANY, None, [])) as swarm:
            until(lambda: swarm.joined == MANY, "all to join")
            swarm.start()
            with started("dashboard", run_dir) as (_, port):
                until(lambda: record(port)["status"]["merges"] > 30, "merges")
                picture(chromium, port, "page-256", LAPTOP, full=True)


def terminal(chromium, run_dir, name):
    """What `skerry top` shows, as a terminal draws it."""
    tmux = ["tmux", "-L", f"skerry-{name}"]
    top = f"{sys.executable} -P -m skerry top {run_dir}"
    subprocess.run([*tmux, "new-session", "-d", "-x", "100", "-y", "22", top], check=True)
    time.sleep(6.0)  # rates are of a few seconds
    shown = subprocess.run([*tmux, "capture-pane", "-e", "-p"], capture_output=True, text=True, check=True).stdout
    subprocess.run([*tmux, "kill-server"], check=True)
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text.from_ansi(shown.rstrip()))
    drawn = run_dir.with_name(f"{name}.svg")
    drawn.write_text(console.export_svg(title="skerry top"))
    page = chromium.new_page(viewport={"width": 1240, "height": 620})
    page.goto(f"file://{drawn}")
    page.screenshot(path=IMAGES / f"{name}.png")
    page.close()


@contextlib.contextmanager
def started(*words):
    """A command that has a page, and the page's port once it is served."""
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-P", "-m", "skerry", *map(str, words)]
        process = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)

        def port():
            said.seek(0)
            found = re.search(rb"http://127\.0\.0\.1:(\d+)/", said.read())
            return int(found[1]) if found else 0

        try:
            found = until(port, "the page")
            until(lambda: "status" in record(found), "the run")
            yield process, found
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(WAIT_S)


def record(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/run", timeout=WAIT_S) as answer:
        return json.load(answer)["record"]


def states(port):
    return {each["state"] for each in record(port)["status"]["learners"].values()}


def until(condition, what):
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {WAIT_S:.0f} s for {what}"
        time.sleep(0.2)
    return found


def picture(chromium, port, name, size, full=False, **options):
    page = chromium.new_page(viewport=size, **options)
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("html[data-number]")
    page.wait_for_timeout(3500)  # so that packets are on their way
    file = IMAGES / f"{name}.png"
    page.screenshot(path=file, full_page=full)
    page.close()
    Image.open(file).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")
    assert file.stat().st_size < BYTES_MAX


if __name__ == "__main__":
    main()
