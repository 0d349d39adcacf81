"""The live page in a real browser, over real runs: values, changes, deaths and returns, narrow, dark, by keyboard."""

import os
import re
import signal

import pytest

pytest.importorskip("playwright")
pytestmark = [pytest.mark.extras, pytest.mark.timeout(300)]

from e2e.processes import Puppet, Syncer, until  # noqa: E402
from extras.browsers import CHROMIUM, browser  # noqa: E402
from node.pair import Pair, config_of  # noqa: E402
from page.pages import Dashboard  # noqa: E402

WAIT_MS = 60_000


@pytest.fixture(scope="module")
def chromium():
    if not os.path.exists(CHROMIUM):
        pytest.skip(f"{CHROMIUM} is not there: apt-get install chromium")
    with browser() as chromium:
        yield chromium


class Sight:
    """An open page, and everything that its console said."""

    def __init__(self, chromium, port, **options):
        self.context = chromium.new_context(**options)
        self.page = self.context.new_page()
        self.complaints = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.requests = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"http://127.0.0.1:{port}/")
        self.page.evaluate("window.opened = true")  # gone if the page is ever loaded anew

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def text(self, selector):
        return self.page.locator(selector).inner_text()

    def shows(self, selector, text):
        """Wait until it does."""
        self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)",
            arg=[selector, text],
            timeout=WAIT_MS,
        )

    @property
    def is_the_same(self):
        return self.page.evaluate("window.opened === true")

    def figure(self, name):
        return self.page.locator("#figures div", has_text=re.compile(f"^{name}")).locator("dd").first.inner_text()


def merged(puppet, times):
    for _ in range(times):
        puppet.merge_once()


def test_values_agree_with_the_run_and_follow_it_without_a_complaint(tmp_path, chromium):
    with Syncer(tmp_path) as syncer, Dashboard(tmp_path, syncer.run_dir) as page, Sight(chromium, page.port) as sight:
        sight.shows("#badge", "no learner yet")
        with Puppet(syncer.port) as puppet:
            merged(puppet, 3)
            sight.shows("#badge", "training")
            sight.shows("#figures", "merges3")
            sight.shows("#learners-table tbody", "puppet")
            merged(puppet, 2)
            sight.shows("#figures", "merges5")
            said = syncer.status
            assert sight.figure("merges") == str(said["merges"]) == "5"
            assert sight.figure("learners training") == "1"
            assert sight.page.locator("#rounds-legend li").count() > 0
            assert "balance" in sight.text("#ledger .read")
        syncer.signal(signal.SIGTERM)
        sight.shows("#badge", "paused")
        assert sight.is_the_same
        assert sight.complaints == []
        assert {url.split("/")[2] for url in sight.requests} == {f"127.0.0.1:{page.port}"}  # nothing from elsewhere


def test_a_lost_learner_and_a_syncer_that_dies_and_returns_are_shown(tmp_path, chromium):
    with Syncer(tmp_path) as syncer, Dashboard(tmp_path, syncer.run_dir) as page, Sight(chromium, page.port) as sight:
        with Puppet(syncer.port) as puppet:
            merged(puppet, 1)
            sight.page.wait_for_selector(".island.training", timeout=WAIT_MS)
        sight.page.wait_for_selector(".island.lost", timeout=WAIT_MS)
        sight.shows("#learners-table tbody tr.lost", "lost")
        sight.shows("#badge", "stalled")
        syncer.process.kill()
        sight.shows("#badge", "not running")
        with Syncer(tmp_path, run_dir=syncer.run_dir) as second, Puppet(second.port) as puppet:
            sight.shows("#badge", "training")
            merged(puppet, 1)
            sight.shows("#events", "another process took over")
        assert sight.is_the_same
        assert sight.complaints == []


def test_a_page_whose_server_died_goes_on_by_itself(tmp_path, chromium):
    with Syncer(tmp_path, "--http-port", "0") as syncer, Puppet(syncer.port) as puppet:
        port = int(re.search(r"look at it: http://127\.0\.0\.1:(\d+)/", syncer.said)[1])
        with Sight(chromium, port) as sight:
            sight.shows("#link", "live")
            (child,) = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_page(pid, syncer.run_dir)]
            os.kill(child, signal.SIGKILL)
            until(lambda: "the page ended" in syncer.said, "its parent to notice")
            merged(puppet, 2)
            sight.shows("#figures", "merges2")
            sight.shows("#link", "live")
            assert sight.is_the_same


def _is_page(pid, run_dir):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return b"dashboard" in words and str(run_dir).encode() in words


def test_on_a_phone_nothing_is_wider_than_the_screen_and_the_dark_is_dark(tmp_path, chromium):
    with Syncer(tmp_path) as syncer, Dashboard(tmp_path, syncer.run_dir) as page, Puppet(syncer.port) as puppet:
        merged(puppet, 4)
        phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": "dark", "reduced_motion": "reduce"}
        with Sight(chromium, page.port, **phone) as sight:
            sight.shows("#figures", "merges4")
            assert sight.page.evaluate("document.documentElement.scrollWidth") <= 360
            background = sight.page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert max(int(part) for part in re.findall(r"\d+", background)[:3]) < 60
            merged(puppet, 1)
            sight.shows("#figures", "merges5")
            assert sight.page.locator(".packet").count() == 0  # who asked for less motion sees none move
            assert sight.complaints == []


def test_on_a_phone_no_legend_of_a_chart_is_cut_off(tmp_path, chromium):
    with Pair(tmp_path / "run", config_of(learners=2, steps=400, sync={"quorum": 1})) as pair:
        pair.join("a")
        pair.join("b", 2)
        pair.run(300)
        pair.close()
    with (
        Dashboard(tmp_path, pair.root) as page,
        Sight(chromium, page.port, viewport={"width": 390, "height": 740}) as sight,
    ):
        sight.shows("#who .u-legend", "quorum")
        legends = "[...document.querySelectorAll('.u-legend')].map((each) => each.scrollWidth - each.clientWidth)"
        assert max(sight.page.evaluate(legends)) <= 0


def test_everything_can_be_reached_by_keyboard(tmp_path, chromium):
    with Syncer(tmp_path) as syncer, Dashboard(tmp_path, syncer.run_dir) as page, Puppet(syncer.port) as puppet:
        merged(puppet, 4)
        with Sight(chromium, page.port) as sight:
            sight.shows("#figures", "merges4")
            for grid in ("map", "rounds"):
                sight.page.focus(f"#{grid}")
                sight.page.keyboard.press("ArrowLeft")
                sight.shows(f"#{grid}-read", "Fragment 0")
                sight.page.keyboard.press("ArrowDown")
                sight.shows(f"#{grid}-read", "Fragment 1")
            sight.page.locator("#learners-table button", has_text="tokens/s").focus()
            sight.page.keyboard.press("Enter")
            assert sight.page.locator("th[aria-sort=descending]").inner_text().startswith("tokens/s")


def test_an_open_page_does_not_grow(tmp_path, chromium):
    count = "document.querySelectorAll('main *').length - document.querySelectorAll('#events *, .packet').length"
    with (
        Syncer(tmp_path) as syncer,
        Dashboard(tmp_path, syncer.run_dir) as page,
        Puppet(syncer.port) as puppet,
        Sight(chromium, page.port) as sight,
    ):
        until(lambda: merged(puppet, 1) or sight.page.locator("#every .uplot").count(), "a chart to be drawn")
        before = sight.page.evaluate(count)
        for _ in range(6):
            merged(puppet, 1)
            sight.shows("#figures", f"merges{sum(puppet.base)}")
        assert sight.page.evaluate(count) <= before + 5
        assert sight.page.locator(".packet").count() <= 48
