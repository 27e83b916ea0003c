"""A sink for Prometheus: a file for its node exporter, or an endpoint that it scrapes."""

from __future__ import annotations

import errno
import hmac
import re
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from paceline.nouns.errors import ReadError, UsageError
from paceline.nouns.reading import read_text, reason_of
from paceline.sinks.numbers import name_of, numbers_of

FILE = "metrics.prom"  # the file's name in the run directory
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHORTEST_TOKEN = 16


class Prometheus:
    """Shows a job's newest numbers to Prometheus: `sinks=[Prometheus]`.

    One place for the whole job, on rank 0; no worker and no cluster is asked. Without `port` it is a file for the node
    exporter's textfile collector, replaced as a whole, `metrics.prom` in the run directory. With `port` it is an
    endpoint, `http://HOST:PORT/metrics`, only on this host. For other hosts set `host`, and a token, which Prometheus
    sends with `authorization: credentials_file:` of its scrape configuration. It is plain HTTP: who listens on the way
    reads token and numbers, so keep it within a network that you trust, or behind a proxy with TLS.

    Gauges: `paceline_step`, `paceline_train{name="loss"}`, `paceline_evaluation{name=...}` and
    `paceline_logged{name=...}`, each with the label `job`. In the file `paceline_ended` is 1 once the job has closed.
    It stays 0 after a failure, and an endpoint is gone by then.

    Args:
        run_dir: the run directory of the job; None where there is none.
        file: the path of the file, in place of `metrics.prom`; its folder must exist.
        port: the port of an endpoint; 0 takes a free one.
        host: the address to listen at.
        token_file: the path of a file with the token, of 16 characters or more; needed beyond loopback.

    Raises:
        UsageError: the package prometheus-client is not installed; options contradict each other; the port is taken;
            the token is missing, short or unreadable.

    Examples:
        >>> from dataclasses import replace
        >>> from pathlib import Path
        >>> from paceline.sinks.prometheus import Prometheus
        >>> sinks = [lambda run_dir: Prometheus(run_dir, file=Path("job.prom"))]
        >>> job = paceline.distribute(replace(workload, sinks=sinks))
        >>> for batch in job.batches():
        ...     mean = job.step(batch)
        >>> job.close()
        >>> [line for line in Path("job.prom").read_text().splitlines() if line.startswith("paceline_step{")]
        ['paceline_step{job="paceline"} 8.0']
    """

    def __init__(
        self,
        run_dir: Path | None,
        file: str | Path | None = None,
        port: int | None = None,
        host: str = LOOPBACK[0],
        token_file: str | Path | None = None,
    ) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise UsageError(
                "can't show numbers to Prometheus",
                "the package prometheus-client is not installed",
                "pip install 'paceline[prometheus]', or leave Prometheus out of sinks",
            ) from None
        _check(file, port, host, token_file)
        self.client = prometheus_client
        self.job = name_of(run_dir)
        self.registry = prometheus_client.CollectorRegistry()
        self.gauges: dict[str, Any] = {}
        self.file = None
        self.server: WSGIServer | None = None
        if port is None:
            self.file = Path(file or (run_dir or Path()) / FILE)
            self.address = str(self.file)
        else:
            token = None if token_file is None else _read_token(Path(token_file))
            self.server = _serve(prometheus_client.make_wsgi_app(self.registry), host, port, token)
            self.address = f"{host}:{self.port}"
        self._gauge("ended").labels(job=self.job).set(0)
        self._write_file()

    @property
    def port(self) -> int | None:
        """Return the port of the endpoint.

        Returns:
            The port, also where a free one was asked for by 0; None where there is a file.

        Examples:
            >>> from paceline.sinks.prometheus import Prometheus
            >>> endpoint = Prometheus(None, port=0)
            >>> endpoint.port > 0
            True
            >>> endpoint.close()
        """
        return None if self.server is None else self.server.server_port

    def write(self, event: Mapping[str, Any]) -> None:
        """Set the gauges of an event's numbers."""
        numbers = numbers_of(event)
        for name, value in numbers.items():
            kind = name.partition("/")[0] if event["event"] != "logged" else "logged"
            label = name if kind == "logged" else name.partition("/")[2]
            self._gauge(kind, "name").labels(job=self.job, name=label).set(value)
        if event["event"] == "end":
            self._gauge("ended").labels(job=self.job).set(1)
        elif event["event"] == "step":
            self._gauge("step").labels(job=self.job).set(event["step"])
        elif not numbers:
            return
        self._write_file()

    def close(self) -> None:
        """Close the endpoint; a file stays."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def _gauge(self, name: str, *labels: str) -> Any:
        if name not in self.gauges:
            help_text = {"ended": "whether the job has ended", "step": "steps done"}.get(
                name, f"newest values of {name}"
            )
            gauge = self.client.Gauge(f"paceline_{name}", help_text, ["job", *labels], registry=self.registry)
            self.gauges[name] = gauge
        return self.gauges[name]

    def _write_file(self) -> None:
        if self.file is not None:
            # It writes another file and renames it: whoever reads sees the old one or the new one.
            self.client.write_to_textfile(str(self.file), self.registry)


def _check(file: object, port: int | None, host: str, token_file: object) -> None:
    """Raise UsageError where options contradict each other."""
    asked = f"Prometheus(host={host!r}, port={port})"
    if port is None:
        for name, value, unset in (("host", host, LOOPBACK[0]), ("token_file", token_file, None)):
            if value != unset:
                raise UsageError(
                    f"Prometheus({name}=...)", "without port there is no endpoint", f"write port=, or no {name}"
                )
    elif file is not None:
        raise UsageError("Prometheus(file=..., port=...)", "it is a file or an endpoint", "leave one of them out")
    elif not 0 <= port < 65536:
        raise UsageError(asked, "a port is a number from 0 to 65535", "write such as port=9400")
    elif host not in LOOPBACK and token_file is None:
        raise UsageError(
            asked,
            "whoever reaches this host could read the job's numbers",
            "write token_file=, a file that others can't read; or leave host out",
        )


def _read_token(path: Path) -> str:
    """Return the token of a file.

    Raises:
        UsageError: it can't be read, is short, or others can read it.
    """
    asked = f"Prometheus(token_file={str(path)!r})"
    try:
        token = read_text(path).strip()
        mode = path.stat().st_mode
    except (OSError, ReadError) as error:
        raise UsageError(asked, reason_of(error), "write a file with a token") from error
    if mode & 0o077:
        raise UsageError(asked, "others can read it", f"chmod 600 {path}")
    if len(token) < _SHORTEST_TOKEN or not re.fullmatch(r"[\x21-\x7e]+", token):
        found = f"it has {len(token)} characters, or some that no header can have"
        fix = "write one of 16 printable characters or more: python -c 'import secrets; print(secrets.token_urlsafe())'"
        raise UsageError(asked, found, fix)
    return token


class _Quiet(WSGIRequestHandler):
    """Answers without a line on standard error for each request."""

    timeout = 10  # s that a client may take to ask

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """Answers each client in a thread of its own, so that a slow one keeps neither others nor the job's end waiting."""

    daemon_threads = True
    block_on_close = False


class _Server6(_Server):
    """The same, at an address of IPv6."""

    address_family = socket.AF_INET6


def _serve(app: Callable[..., object], host: str, port: int, token: str | None) -> WSGIServer:
    """Serve numbers in a thread.

    Raises:
        UsageError: the address can't be listened at.
    """

    def guarded(environment: dict[str, Any], start: Callable[..., object]) -> Any:
        authorization = environment.get("HTTP_AUTHORIZATION", "")
        if token is not None and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
            return [b"a token is needed\n"]
        if environment.get("PATH_INFO") not in ("/metrics", "/"):
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"the numbers are at /metrics\n"]
        return app(environment, start)

    kind = _Server6 if ":" in host else _Server
    try:
        server = make_server(host, port, guarded, server_class=kind, handler_class=_Quiet)
    except OSError as error:
        is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        fix = "choose a free port, or port=0 for any" if is_taken else "write an address of this host"
        raise UsageError(f"Prometheus(host={host!r}, port={port})", str(error), fix) from error
    threading.Thread(target=server.serve_forever, name="prometheus", daemon=True).start()
    return server
