"""Who may look, and what a browser may do with what it gets: asked of every request before anything else.

A page on this machine alone is for whoever is on it, unless a token is asked for. It answers only to names of this
machine: a website that has its own name lead here (DNS rebinding) gets nothing. Beyond this machine a token is always
asked for, and whoever knows it may call the page by any name. The token comes once in the address, and from then on a
cookie proves that it was known; a program shows it as `Authorization: Bearer`. Nothing can be changed here, so only GET
and HEAD are answered.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PROVEN = "skerry.is_proven"  # in the state of a request
HEADERS = {
    # Scripts, styles and data from here and from nowhere else; no frames, no forms, no plugins.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # an address may have had the token in it
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}


class Guard:
    """Around an application: `token` is the secret that is asked for, if any; `is_local`: it is bound to loopback.

    A browser sends a cookie to every port of a host. So its name has the port and something of the token, and pages of
    one host do not overwrite each other's; and what it holds is good for this port and this token alone.
    """

    def __init__(self, app: ASGIApp, token: bytes | None, is_local: bool, port: int) -> None:
        assert token or is_local, "beyond this machine a token is asked for"
        self.app, self.token, self.is_local = app, token, is_local
        self._cookie = f"skerry_{port}_{_digest(token, f'name {port}')[:8]}" if token else ""
        self._proof = _digest(token, f"proof {port}") if token else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        refusal = self._objection(scope) or self._entrance(scope)
        if refusal is None:
            scope["state"][_PROVEN] = True

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if refusal is not None or message["status"] >= 400:
                    headers["Connection"] = "close"  # only who looks at the page keeps a connection
            await send(message)

        await (refusal or self.app)(scope, receive, with_headers)

    def _objection(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page is for looking only.\n", 405, {"Allow": "GET, HEAD"})
        if self.is_local and not is_local_name(Headers(scope=scope).get("host", "")):
            return PlainTextResponse("This page answers to 127.0.0.1 and localhost only.\n", 421)
        return None

    def _entrance(self, scope: Scope) -> Response | None:
        """Who does not show the token is told so; who shows it in the address gets the cookie instead."""
        if self.token is None:
            return None
        shown = QueryParams(scope["query_string"]).get("token")
        if shown is not None and hmac.compare_digest(shown.encode(), self.token):
            answer = RedirectResponse(scope["path"] if is_plain(scope["path"]) else "/", 303)
            answer.set_cookie(self._cookie, self._proof, httponly=True, samesite="strict", path="/")
            return answer
        if self._is_known(Headers(scope=scope)):
            return None
        advice = "Open it once as /?token=TOKEN, with what the file given as --http-token-file holds.\n"
        return PlainTextResponse(f"This page needs a token. {advice}", 401)

    def _is_known(self, headers: Headers) -> bool:
        assert self.token is not None
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(bearer.strip().encode(), self.token):
            return True
        cookie = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        return hmac.compare_digest(cookie.encode(), self._proof.encode())


def is_proven(state: Mapping[str, Any]) -> bool:
    """Whether the request with this state was let in; false until a guard has looked at it."""
    return _PROVEN in state


def is_local_name(host: str) -> bool:
    """Whether a Host header, with or without a port, is a name that leads to this machine whoever is asked."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return name.lower() == "localhost"


def is_plain(path: str) -> bool:
    """Whether a path leads to this server: one that begins with two slashes names another."""
    return path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()


def _digest(token: bytes, what: str) -> str:
    """Of the token, for one use: it tells nobody the token, nor what another use has."""
    return hmac.new(token, f"skerry page {what}".encode(), sha256).hexdigest()
