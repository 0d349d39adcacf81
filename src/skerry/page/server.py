"""The server of the page: one record of the run for everybody who looks, sent whole once and then as it changes.

    GET /              the page            GET /api/run      the record, whole
    GET /static/...    what it is made of  GET /api/events   what changes of it, as server-sent events
    GET /metrics       numbers for Prometheus

A task looks at the run directory once a second (`feed.py`), on a thread, and keeps the last few changes. Each viewer
follows them at its own pace; one that has fallen behind, or comes with the number of an earlier record, is sent the
whole again. So viewers cost the syncer nothing, and have no queues here that could grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h11
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from skerry.addresses import place_of
from skerry.page.changes import changes
from skerry.page.feed import Feed
from skerry.page.guard import Guard, is_proven
from skerry.page.metrics import CONTENT_TYPE, exposition

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

STATIC = Path(__file__).parent / "static"
LOOK_S = 1.0  # between two looks at the run directory
DIGITS_MAX = 18  # of a record's number, one a second; `int` refuses thousands of them
KEPT = 60  # changes for those who are a little behind
BEAT_S = 10.0  # a viewer hears something at least this often
SEND_S = 30.0  # for a viewer to take in what it was sent
VIEWERS_MAX = 64
PASSING_MAX = 64  # connections of viewers that do not follow events: a page asks for its parts, a machine for numbers
STRANGERS_MAX = 128  # connections that have not yet asked for anything, or were not let in,
STRANGERS_PER_PLACE_MAX = 64  # and those of one address
REQUEST_S = 10.0  # for a connection to ask for something, from its beginning or its last answer on
_FOLLOWS = "skerry.follows"  # in the state of a request that has one of the viewers' places
PARENT_POLL_S = 0.5


class Page:
    """The record of a run as viewers have it: its number, its last changes, and who waits for the next."""

    def __init__(self, root: Path) -> None:
        self.feed = Feed(root)
        self.birth = secrets.token_hex(4)  # of this process: numbers of another mean nothing here
        self.number = 0
        self.record: dict[str, Any] = {}
        self.viewers = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._whole: tuple[int, bytes] = (-1, b"")
        self._news = asyncio.Event()

    def take(self, record: dict[str, Any]) -> None:
        """There was a look: viewers are told if it shows anything they do not have."""
        patch = changes(self.record, record)
        if patch is None:
            return
        self.record = record
        self.number += 1
        self._kept.append((self.number, _event("change", f"{self.birth}-{self.number}", msgspec.json.encode(patch))))
        self._news.set()
        self._news = asyncio.Event()

    @property
    def whole(self) -> bytes:
        """The record and its number, encoded once however many ask."""
        if self._whole[0] != self.number:
            body = {"number": f"{self.birth}-{self.number}", "record": self.record}
            self._whole = (self.number, msgspec.json.encode(body))
        return self._whole[1]

    def since(self, number: int | None) -> list[bytes]:
        """What brings a viewer with this record up to date."""
        if number is None or number > self.number or number < self.number - len(self._kept):
            return [_event("whole", f"{self.birth}-{self.number}", self.whole)]
        return [event for each, event in self._kept if each > number]

    def known(self, said: str) -> int | None:
        """The number that a viewer says it has, if it is one of ours."""
        birth, _, number = said.partition("-")
        is_number = len(number) <= DIGITS_MAX and number.isascii() and number.isdigit()
        return int(number) if birth == self.birth and is_number else None

    async def news(self) -> None:
        """Wait until there is something further, or for a while."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), BEAT_S)


class Events:
    """`/api/events`, written straight to the connection, which ends when a viewer does not take in what it is sent."""

    def __init__(self, page: Page) -> None:
        self.page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.page.viewers >= VIEWERS_MAX:
            words = f"{VIEWERS_MAX} pages of this run are open, which is all there may be: close one of them.\n"
            await PlainTextResponse(words, 503, {"Retry-After": "30"})(scope, receive, send)
            return
        self.page.viewers += 1
        scope["state"][_FOLLOWS] = True
        following = asyncio.create_task(self._follow(Request(scope), send))
        hung_up = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((following, hung_up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.page.viewers -= 1
            following.cancel()
            hung_up.cancel()
            await asyncio.gather(following, hung_up, return_exceptions=True)

    async def _follow(self, request: Request, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        said = request.headers.get("last-event-id") or request.query_params.get("since", "")
        number = self.page.known(said)
        while True:
            events = self.page.since(number)
            number = self.page.number
            body = b"".join(events) or b"event: beat\ndata: {}\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
            if self.page.number == number:
                await self.page.news()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(name: str, number: str, data: bytes) -> bytes:
    """JSON has no line breaks of its own, so the data is one line."""
    return b"event: %s\nid: %s\ndata: %s\n\n" % (name.encode(), number.encode(), data)


def application(page: Page, token: bytes | None, is_local: bool, port: int) -> Guard:
    """What is served, behind its guard."""

    async def run(request: Request) -> Response:
        return Response(page.whole, media_type="application/json")

    async def metrics(request: Request) -> Response:
        return Response(exposition(page.record), headers={"Content-Type": CONTENT_TYPE})

    async def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    routes = [
        Route("/", index),
        Route("/api/run", run),
        Route("/api/events", Events(page)),
        Route("/metrics", metrics),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Guard(Starlette(routes=routes), token, is_local, port)


# ---------------------------------------------------------------------------------------------- the process


def serve(root: Path, listener: socket.socket, token: bytes | None, is_local: bool, parent: int = 0) -> None:
    """Serve the run in this directory on a socket that listens, until SIGTERM, SIGINT, or the end of the parent."""
    asyncio.run(_serve(root, listener, token, is_local, parent))


async def _serve(root: Path, listener: socket.socket, token: bytes | None, is_local: bool, parent: int) -> None:
    page = Page(root)
    page.take(await asyncio.to_thread(page.feed.look))  # the first who asks is told everything
    server = _Server(
        uvicorn.Config(
            application(page, token, is_local, listener.getsockname()[1]),
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # its warnings are of what strangers say, as often as they please
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(REQUEST_S),
            timeout_graceful_shutdown=1,
        )
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.end)
    looking = asyncio.create_task(_look(page))
    looking.add_done_callback(lambda _: server.end())  # a bug there ends the process, and is raised below
    watching = asyncio.create_task(_watch(parent, server.end))
    await server.serve(sockets=[listener])
    watching.cancel()
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking


async def _look(page: Page) -> None:
    while True:
        if not page.feed.is_behind:
            await asyncio.sleep(LOOK_S)
        page.take(await asyncio.to_thread(page.feed.look))


async def _watch(parent: int, end: Callable[[], None]) -> None:
    while not parent or os.getppid() == parent:
        await asyncio.sleep(PARENT_POLL_S)
    end()


class _Server(uvicorn.Server):
    def end(self) -> None:
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's own: it ends in order, and exits with 0."""
        yield


class _Connection(H11Protocol):
    """A connection has a deadline for whatever is awaited of it, and makes way for others where there are too many.

    Awaited is a whole request, however its bytes come in, or that it takes in what it was sent. While an answer is
    being made, which for a viewer of events is most of the time, nothing is. Newcomers are always let in: so nobody who
    holds connections, with or without the token, can keep others out.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        super().connection_made(transport)
        self.place = place_of(self.client[0] if self.client else "")
        transport.set_write_buffer_limits(high=0)  # so `resume_writing` means that everything was taken in
        self._await(REQUEST_S)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._await(None)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.flow.write_paused:
            self._await(None)

    def on_response_complete(self) -> None:
        if not self.flow.write_paused:
            self._await(REQUEST_S)
        super().on_response_complete()  # which may find the next request

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so, unless it comes where an answer was begun: there it only ends the connection."""
        if self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
            return
        self.cycle.disconnected = True
        self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await(SEND_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._await(None if self._is_answering else REQUEST_S)

    def _await(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    @property
    def is_proven(self) -> bool:
        """Whether what it last asked for was asked by somebody who may look."""
        return self.scope is not None and is_proven(self.scope["state"])

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_following(self) -> bool:
        return self._is_answering and _FOLLOWS in self.scope["state"]

    def _make_room(self) -> None:
        """For this one: viewers and strangers have places of their own, and who follows events keeps its place."""
        others = [each for each in self.connections if isinstance(each, _Connection) and each is not self]
        strangers = [each for each in others if not each.is_proven]
        neighbours = [each for each in strangers if each.place == self.place]
        passing = [each for each in others if each.is_proven and not each._is_following]
        if len(neighbours) >= STRANGERS_PER_PLACE_MAX:
            self._drop_oldest(neighbours)
        elif len(strangers) >= STRANGERS_MAX:
            self._drop_oldest(strangers)
        if len(passing) >= PASSING_MAX:
            self._drop_oldest(passing)

    def _drop_oldest(self, connections: list[_Connection]) -> None:
        oldest = min(connections, key=lambda each: each._since)
        self.connections.discard(oldest)  # it is gone a moment later, and must not be chosen again
        oldest.transport.abort()
