"""A real page in a process of its own, and what a browser would do to it, by hand over real sockets."""

import http.client
import json
import re

from e2e.processes import WAIT_S, Running, until
from skerry.page.changes import applied


class Dashboard(Running):
    """`skerry dashboard` over a run directory, up when the constructor returns."""

    def __init__(self, folder, run_dir, *words):
        super().__init__(folder, "dashboard", run_dir, *words)
        self.port = until(self._served, "the page to be served")

    def _served(self):
        assert self.process.poll() is None, self.said
        found = re.search(r"http://\S+?:(\d+)/", self.said)
        return int(found[1]) if found else 0

    def get(self, path="/", method="GET", **headers):
        return asked(self.port, path, method, **headers)

    @property
    def run(self):
        return json.loads(self.get("/api/run").text)["record"]


class Answer:
    def __init__(self, response):
        self.status, self.headers = response.status, response.headers
        self.text = response.read().decode()


def asked(port, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return Answer(connection.getresponse())
    finally:
        connection.close()


class Viewer:
    """A page that is open: it follows `/api/events` and keeps the record as static/changes.js does."""

    def __init__(self, port, since="", path="/api/events"):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        self.connection.request("GET", f"{path}?since={since}")
        self.response = self.connection.getresponse()
        self.record, self.number, self.kinds = None, "", []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()

    def take(self):
        """The next event, put into the record; its kind."""
        event = {}
        while line := self.response.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            event[name] = value
        assert event, "the connection was closed"
        data, kind = json.loads(event["data"]), event["event"]
        if kind == "whole":
            self.record = data["record"]
        elif kind == "change":
            self.record = applied(self.record, data)
        self.number = event.get("id", self.number)
        self.kinds.append(kind)
        return kind

    def until(self, condition, what):
        """Take events until the record is so; each look of the server is one."""
        return until(lambda: (self.take(), condition(self.record))[1], what)
