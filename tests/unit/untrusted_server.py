"""A server whose certificate nobody trusts, for tests of what clients make of that."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infra.certificate import own_certificate


@contextmanager
def untrusted_server(directory: Path) -> Iterator[str]:
    """Yield the address of a server that shows a certificate it signed itself, as long as the block lasts.

    Args:
        directory: for the certificate.
    """
    pem = directory / "stranger.pem"
    pem.write_text(own_certificate("a stranger"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def shake_hands() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:  # the test is over
                    return
                with connection, suppress(OSError):
                    context.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=shake_hands, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
