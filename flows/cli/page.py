"""`rlhf page` and `rlhf compare`: a run's report as one page, and the same of any two policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_urlsafe
from threading import Thread
from typing import TYPE_CHECKING

from flows.cli.output import console
from infra.loopback import ADDRESS

if TYPE_CHECKING:
    from infra.artifacts import ArtifactStore, Manifest


def page(reference: str | None = None, /, *, port: int = 0) -> None:
    """Show a run's report as one page in your browser, until Ctrl-C; whoever lacks the printed address sees nothing.

    Args:
        reference: `run/NAME` (its latest), or `run/NAME@VERSION`; the newest report of all when left out.
        port: of this machine alone; 0 takes a free one.
    """
    from infra.artifacts import open_default_store
    from infra.errors import ReferenceNotFoundError
    from tasks.report.write import WHOLE_PAGE

    store = open_default_store()
    manifest = _newest(store) if reference is None else store.resolve(reference)
    if WHOLE_PAGE not in {entry.path for entry in manifest.files}:
        raise ReferenceNotFoundError(
            f"{manifest.uri} has no {WHOLE_PAGE}: it is no report of a run, or its night made no policy, or "
            "an earlier release stored it; compare its policy with another: rlhf compare A B"
        )
    _show(store.read_bytes(manifest, WHOLE_PAGE), manifest.uri, port)


def compare(before: str, after: str, /, *, to: Path | None = None, port: int | None = None) -> None:
    """Print what is different between two policies, or the policies of two runs: answers, figures, code, data.

    Args:
        before: `run/NAME@VERSION`, or a policy or SFT model that was evaluated.
        after: the other.
        to: file for the whole as one page, with both answers to each problem.
        port: show that page in your browser, until Ctrl-C; 0 takes a free port.
    """
    from rich.markdown import Markdown

    from tasks.context import open_context
    from tasks.report.compare import facts_between
    from tasks.report.html import page_of_facts
    from tasks.report.text import report_text

    screen = console()
    facts = facts_between(open_context(), before, after)
    screen.print(Markdown(report_text(facts, {}), hyperlinks=False))
    whole = page_of_facts(facts).encode()
    if to is not None:
        to.write_bytes(whole)
        screen.print(f"as one page: {to}", style="dim")
    if port is not None:
        _show(whole, f"{before} and {after}", port)


def _newest(store: ArtifactStore) -> Manifest:
    """Return the newest report that has a page: a night that made no policy, such as a quiet one, has none."""
    from infra.errors import ReferenceNotFoundError
    from tasks.report.write import WHOLE_PAGE

    reports = [each for each in store.list("run") if WHOLE_PAGE in {entry.path for entry in each.files}]
    if not reports:
        raise ReferenceNotFoundError(
            f"{store.url} holds no report of a run with a page; make one with `rlhf run quickstart`"
        )
    return max(reports, key=lambda each: each.created)


def _show(whole: bytes, what: str, port: int) -> None:
    with serving(whole, port) as (address, thread):
        console().print(f"{what}: {address} (Ctrl-C ends it)", soft_wrap=True)
        thread.join()


@contextmanager
def serving(whole: bytes, port: int) -> Iterator[tuple[str, Thread]]:
    """Serve one page on the loopback address, and yield its address with the thread that serves it.

    The address has a secret, which other users of the machine do not know. It answers under its own names alone, so
    that no page of another site reads it through a name that leads here.

    Args:
        whole: the page.
        port: to listen on; 0 takes a free one.

    Raises:
        ServiceError: the port is taken.
    """
    from infra.errors import ServiceError

    path = f"/{token_urlsafe(16)}/"

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_ours = self.headers.get("Host") == f"{ADDRESS}:{self.server.server_address[1]}"  # type: ignore[index]
            found = is_ours and self.path == path
            self.send_response(200 if found else 404)
            body = whole if found else b"Not found: take the address that the command printed.\n"
            self.send_header("Content-Type", f"text/{'html' if found else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            for name, value in (
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                ("Referrer-Policy", "no-referrer"),
                ("Content-Security-Policy", "frame-ancestors 'none'"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Write no line for each request."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Page)
    except OSError as error:
        raise ServiceError(
            f"port {port} of {ADDRESS} cannot be taken ({error}); give another --port, or none"
        ) from None
    server.daemon_threads = True
    with server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{ADDRESS}:{server.server_address[1]}{path}", thread
        finally:
            server.shutdown()
