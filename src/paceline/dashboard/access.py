"""Admit only requests that have the token, and only under names of this server.

A page of another site can make a browser send requests here. So a request needs the token, as a cookie or a header, and
a request that changes something also needs to come from one of the dashboard's own pages.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.nouns.errors import UsageError

TOKEN_VARIABLE = "PACELINE_DASHBOARD_TOKEN"
LEAST_CHARACTERS = 16
_FORM = re.compile(r"[A-Za-z0-9_.~-]+")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HEADERS = {
    # plotly.js writes style elements; scripts come only from this server.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_SOON = "private, max-age=600"  # a newer version of Paceline, or plotly, has the same addresses


def token_of(environment: Mapping[str, str]) -> str:
    """Return the token in the environment, or a new one.

    Raises:
        UsageError: the environment's is short, or has characters that an address can't have.
    """
    token = environment.get(TOKEN_VARIABLE)
    if token is None:
        return secrets.token_urlsafe(24)
    if len(token) < LEAST_CHARACTERS or not _FORM.fullmatch(token):
        raise UsageError(
            f"the token in {TOKEN_VARIABLE}",
            f"it has {len(token)} characters; {LEAST_CHARACTERS} or more are needed, of A-Z a-z 0-9 _ . ~ -",
            f"take `openssl rand -hex 16`, or unset {TOKEN_VARIABLE}: then one is made",
        )
    return token


@dataclass(frozen=True, slots=True)
class Access:
    """The rules by which requests may use the server.

    Args:
        token: the token that a request must have.
        port: the port of the server. Cookies are sent to all ports of a host, so their name has it.
        hosts: the names under which it may be asked for; empty: any name, where it listens beyond loopback.
    """

    token: str
    port: int
    hosts: Sequence[str] = LOOPBACK

    @property
    def cookie(self) -> str:
        """Return the name of the cookie."""
        return f"paceline_dashboard_{self.port}"

    def is_right(self, token: str) -> bool:
        """Return whether a token is the server's, in a time that does not depend on the number of equal characters."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that may not pass; None: it may."""
        # Starlette before 1.0.1 makes `request.url` of the Host header, which may hold a path. The scope has its own.
        path = str(request.scope["path"])
        name = _host_of(request.headers.get("host", ""))
        if self.hosts and name not in self.hosts:
            # A page of another site, whose name somebody has made point to this address.
            return PlainTextResponse(f"this server is not {name[:100]!r}: open the address that it printed\n", 421)
        if path.startswith("/static/"):
            return None
        if (token := request.query_params.get("token")) is not None:
            return self._entered(request, token)
        if not self._has_token(request):
            return LoginNeededResponse()
        if request.method not in ("GET", "HEAD") and not self._is_own_page(request):
            return PlainTextResponse("this request does not come from a page of the dashboard\n", 403)
        return None

    def _entered(self, request: Request, token: str) -> Response:
        """Keep a right token as a cookie, and leave it out of the address, which histories keep."""
        if not self.is_right(token):
            return LoginNeededResponse(was_wrong=True)
        other_parameters = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        # A path that begins with two slashes would be the name of another host.
        path = "/" + quote(str(request.scope["path"]).lstrip("/"))
        answer = RedirectResponse(path + (f"?{urlencode(other_parameters)}" if other_parameters else ""), 303)
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="lax", path="/")
        return answer

    def _has_token(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.is_right(token.strip())
        return self.is_right(request.cookies.get(self.cookie, ""))

    def _is_own_page(self, request: Request) -> bool:
        if request.headers.get("authorization"):
            return True  # no browser sends that by itself
        origin = request.headers.get("origin", "")
        return origin == f"http://{request.headers.get('host', '')}"


class LoginNeededResponse(PlainTextResponse):
    """The answer that a token is needed. The app shows its page in place of this.

    Args:
        was_wrong: True where the request had another token than the server.
    """

    def __init__(self, was_wrong: bool = False) -> None:
        super().__init__("a token is needed\n", 401)
        self.was_wrong = was_wrong


class Guard:
    """Ask `Access` before each request, and add to each answer the headers by which browsers refuse other content.

    Args:
        app: the application that answers.
        access: the rules for requests.
        login_page: a function that makes the page for users without the token.
    """

    def __init__(self, app: ASGIApp, access: Access, login_page: Callable[[bool], Response]) -> None:
        self.app = app
        self.access = access
        self.login_page = login_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                is_static = scope["path"].startswith("/static/") and message["status"] == 200
                headers.setdefault("Cache-Control", _SOON if is_static else "no-store")
            await send(message)

        request = Request(scope)
        refusal = self.access.refusal(request)
        if isinstance(refusal, LoginNeededResponse):
            refusal = self.login_page(refusal.was_wrong)
        await (self.app if refusal is None else refusal)(scope, receive, send_with_headers)


def _host_of(header: str) -> str:
    """Return the name in a Host header, without the port; a header of another form is returned as it is."""
    found = _HOST.fullmatch(header)
    return header if found is None else (found[1] or found[2]).lower()
