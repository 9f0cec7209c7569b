"""Asking an S3 server until it answers: how long we wait for it, and what its refusals and silences mean.

A silence and a server's own error may pass, so the request is made again until its deadline. A refusal does not pass:
it becomes an error whose sentence says who can mend it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from aiohttp import ClientError as AioHttpError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError
from botocore.utils import is_valid_uri
from urllib3.exceptions import HTTPError as Urllib3Error

from infra.artifacts.backend import clock
from infra.errors import StoreAwayError, StoreError, StoreNotReadyError, is_untrusted

T = TypeVar("T")
log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
QUIET_S = 5.0
"""What takes no longer than this to pass is not worth a line in the log."""
LATE_S = 5.0
"""A request that exceeds its limit by more than this was stopped with its process, as when a laptop sleeps."""
LONGEST_STOP_S = 1800.0
"""How long a request may be stopped in all, uncounted: a writer's lease holds an hour longer than it relies on it."""
REQUEST_ERRORS = (OSError, BotoCoreError, ClientError, ResponseParserError, AioHttpError, Urllib3Error)
"""All that a request may raise: what breaks off in the body of an answer is not always botocore's own error."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, in seconds."""

    connect_s: float = 5.0
    read_s: float = 30.0
    """For the next bytes of an answer."""
    attempt_s: float = 40.0
    """For one request as a whole, and more for a body: see `slowest`. Nothing else ends a small write to a server that
    hangs: before its body it waits for an answer (100 Continue), and `read_s` does not count that."""
    deadline_s: float = 120.0
    """For an answer, over all attempts: a server that is away for a minute delays a run, it does not end it."""
    slowest: float = 100e3
    """Bytes a second at which a body is still waited for; one without any bytes is not, after `read_s`."""
    open_s: float = 8.0
    """The deadline when a store is opened for the first time: a wrong address is reported soon."""

    delete_s: float = 120.0
    """The longest deadline of a deletion, however patient everything else is: `leases.DELETION_LIFE` counts on it."""

    @classmethod
    def of(cls, deadline_s: float | None, *, patient: bool) -> Self:
        """Return one with another deadline; None is the usual one.

        Args:
            deadline_s: for an answer, over all attempts.
            patient: whether it holds for the first opening, too: where nobody waits at a screen.
        """
        usual = cls()
        deadline_s = usual.deadline_s if deadline_s is None else deadline_s
        return cls(deadline_s=deadline_s, open_s=deadline_s if patient else usual.open_s)


class Retrier:
    """Runs requests against one bucket until they are answered or the deadline has passed."""

    def __init__(self, endpoint_url: str | None, bucket: str, patience: Patience) -> None:
        self._server = server_name(endpoint_url)
        self._bucket = bucket
        self._patience = patience

    @property
    def server(self) -> str:
        """What messages call the server."""
        return self._server

    def run(
        self,
        what: str,
        attempt: Callable[[float], T],
        limit_s: float | None = None,
        size: int = 0,
        *,
        stops_count: bool = False,
    ) -> T:
        """Return the attempt's result.

        Args:
            what: what is done, for the message ("writing keys/...").
            attempt: makes the request once, within the seconds that it is given.
            limit_s: a deadline of its own, in place of the usual one.
            size: of the body that is sent, in bytes: a slow line is not a server that is away.
            stops_count: whether the deadline comes nearer while this process is stopped: others count on it.

        Raises:
            RefusedError: if the server said no, in a way that does not pass.
            StoreAwayError: if there was no answer until the deadline.
        """
        body_s = size / self._patience.slowest
        limit_s = body_s + (self._patience.deadline_s if limit_s is None else limit_s)
        waiting = _Waiting(forgives_s=0.0 if stops_count else LONGEST_STOP_S)
        attempt_s = self._patience.attempt_s + body_s
        pause_s, told, reason = FIRST_PAUSE_S, False, ""
        while True:
            given_s = max(0.1, min(attempt_s, limit_s - waiting.seconds))
            try:
                result = attempt(given_s)
            except REQUEST_ERRORS as error:
                latest = reason_to_retry(error, what, self._server, self._bucket)
                # an attempt that the deadline cut short tells less than the answer before it
                if given_s == attempt_s or latest != _NO_ANSWER or not _is_answer(reason):
                    reason = latest
            else:
                if told:
                    log.warning("the S3 server %s answers again: %s", self._server, what)
                return result
            waiting.note(given_s)
            away = StoreAwayError(self._unanswered(what, limit_s, reason))
            if limit_s - waiting.seconds <= pause_s:
                raise away
            if waiting.seconds > QUIET_S and not told:
                told = True
                silent = f"the S3 server {self._server} does not answer ({reason})"
                log.warning("%s: %s; trying for %.0f s more", what, silent, limit_s - waiting.seconds)
            clock.pause(paused_s := pause_s * random.uniform(0.5, 1.0))
            waiting.note(paused_s)
            if waiting.seconds >= limit_s:  # stopped in the pause
                raise away
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _unanswered(self, what: str, limit_s: float, reason: str) -> str:
        if _is_answer(reason):
            return (
                f"the S3 server {self._server} could not do what we asked within {limit_s:.0f} s, {what} in the bucket "
                f"{self._bucket!r}: {reason}; look into its log, and whether its disk is full"
            )
        return (
            f"the S3 server {self._server} did not answer within {limit_s:.0f} s while {what} in the bucket "
            f"{self._bucket!r} ({reason}); check that it runs and that RLHF_S3_ENDPOINT_URL is its address"
        )


def _is_answer(reason: str) -> bool:
    return reason.startswith("it answered")


class _Waiting:
    """How long a request has waited, on a clock that goes on while the machine sleeps.

    Args:
        forgives_s: for so long, in all, the process may be stopped without that being counted.
    """

    def __init__(self, forgives_s: float) -> None:
        self.seconds = 0.0
        self._forgives_s = forgives_s
        self._last = clock.boottime()

    def note(self, expected_s: float) -> None:
        """Count the time since the last note, in which nothing was done that takes longer than expected."""
        now = clock.boottime()
        took_s, self._last = now - self._last, now
        forgiven_s = min(max(0.0, took_s - expected_s - LATE_S), self._forgives_s)
        self._forgives_s -= forgiven_s
        self.seconds += took_s - forgiven_s


_NO_ANSWER = "no answer in time"
FORBIDDEN = {"AccessDenied", "AllAccessDisabled", "403"}
CONDITION_FAILED = {"PreconditionFailed", "412", "NotImplemented", "501"}
"""Servers that know no conditions refuse each of them."""
ABSENT = {"NoSuchKey", "404"}
_PASSING_CODES = {
    "BadDigest",  # the body was damaged on its way
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
}
_FULL_CODES = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}
_SKEWED = "RequestTimeTooSkewed"
"""It passes, but not within one request: NTP soon sets the clock of a machine that has just woken."""
_UNKNOWN_KEY = "the S3 server {server} does not know our access key; check RLHF_S3_ACCESS_KEY"
_EXPIRED = "our temporary keys for the S3 server {server} have expired; get new ones, with their session token"
_ELSEWHERE = "the bucket {bucket!r} is not in the region that we asked in; set RLHF_S3_REGION to its own"
_FORBIDDEN = (
    "the S3 server {server} forbids us {what} in the bucket {bucket!r}; check the keys, or ask for that permission"
)
_FULL = (
    "the S3 server {server} has no room left for {what} in the bucket {bucket!r} ({code}): "
    "its disk or a quota is full; make room, and run it again"
)
_OTHER = "the S3 server {server} refused {what} in the bucket {bucket!r} ({code}, status {status})"
_SENTENCES = {
    "SignatureDoesNotMatch": "the S3 server {server} refuses our secret key; check RLHF_S3_SECRET_KEY",
    **dict.fromkeys(("InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId"), _UNKNOWN_KEY),
    **dict.fromkeys(("ExpiredToken", "TokenRefreshRequired"), _EXPIRED),
    **dict.fromkeys(("PermanentRedirect", "AuthorizationHeaderMalformed", "301"), _ELSEWHERE),
    "NoSuchBucket": (
        "the S3 server {server} has no bucket {bucket!r}; create it with "
        "`aws s3 mb s3://{bucket}` or name another in RLHF_STORE_URL"
    ),
    _SKEWED: "the S3 server {server} and this machine differ on the time; set the clock (NTP)",
    **dict.fromkeys(_FULL_CODES, _FULL),
    **dict.fromkeys(FORBIDDEN, _FORBIDDEN),
}
_SERVER_ERRORS = 500
_NOT_IMPLEMENTED = 501
_INSUFFICIENT_STORAGE = 507
_TOO_MANY_REQUESTS = 429
_SILENCES = (
    BotoConnectionError,
    HTTPClientError,
    IncompleteReadError,
    CredentialRetrievalError,  # the service that issues them is away
)
"""Those of botocore; its others complain of our settings."""


class RefusedError(StoreError):
    """The server answered, and said no; `code` is S3's word for why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Say how to make it again in another process: Exception would pass on the message alone."""
        return type(self), (str(self), self.code)


def reason_to_retry(error: Exception, what: str, server: str, bucket: str) -> str:
    """Return in a few words why an error of a request may pass.

    Args:
        error: one of REQUEST_ERRORS.
        what: what was done ("writing keys/...").
        server: what messages call the server.
        bucket: the bucket.

    Raises:
        RefusedError: if the server said no, in a way that does not pass.
        StoreNotReadyError: if our clock or the server's is wrong.
        StoreError: if it is our settings that are wrong, or the server's certificate.
    """
    answer = error if isinstance(error, ClientError) else error.__cause__
    if isinstance(answer, ClientError):
        code, status = _code_and_status(answer.response)
        if _passes(code, status):
            return f"it answered {code} ({status})"
        refusal = _refusal(code, status, what, server, bucket)
        if code == _SKEWED:
            raise StoreNotReadyError(refusal) from None
        raise RefusedError(refusal, code) from None
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        raise StoreError(
            f"no access key for the S3 server {server}; set RLHF_S3_ACCESS_KEY and RLHF_S3_SECRET_KEY, "
            "or name a profile (RLHF_S3_PROFILE) or a Prefect block (RLHF_S3_CREDENTIALS_BLOCK)"
        ) from None
    if isinstance(error, ProfileNotFound):
        raise StoreError(f"{error}; name one of ~/.aws in RLHF_S3_PROFILE or AWS_PROFILE") from None
    if is_untrusted(error):
        raise StoreError(
            f"the certificate of the S3 server {server} is not trusted, or out of date, or has another name; get a "
            "new one for the server, or name the file of who signed it in AWS_CA_BUNDLE"
        ) from None
    if isinstance(error, _SILENCES) or not isinstance(error, BotoCoreError):
        return _kind(error)
    complaint = shorten(str(error), 150)  # botocore's take several lines
    raise StoreError(f"the settings of the S3 store do not fit: {complaint}") from None


def server_name(endpoint_url: str | None) -> str:
    """Return what messages call the server, once its address is seen to be one, and to hold no credentials."""
    if not endpoint_url:
        return "of AWS"
    with suppress(ValueError):  # what looks like IPv6, and is not
        parts = urlsplit(endpoint_url)
        if parts.scheme in {"http", "https"} and "@" not in parts.netloc and is_valid_uri(endpoint_url):
            return f"{parts.scheme}://{parts.netloc}{parts.path}"
    raise StoreError(
        "the address of the S3 server (RLHF_S3_ENDPOINT_URL) must be http://host:port or https://host:port, the host "
        "of letters, digits, dots and dashes; keys are set in RLHF_S3_ACCESS_KEY and RLHF_S3_SECRET_KEY"
    )


def _passes(code: str, status: int) -> bool:
    if status in {_NOT_IMPLEMENTED, _INSUFFICIENT_STORAGE} or code in _FULL_CODES:
        return False
    return status >= _SERVER_ERRORS or status == _TOO_MANY_REQUESTS or code in _PASSING_CODES


def _refusal(code: str, status: int, what: str, server: str, bucket: str) -> str:
    """Return the sentence for an answer that will be the same next time."""
    sentence = _SENTENCES.get(code, _FULL if status == _INSUFFICIENT_STORAGE else _OTHER)
    return sentence.format(code=code, status=status, what=what, server=server, bucket=bucket)


def _code_and_status(response: Any) -> tuple[str, int]:
    code = str(response.get("Error", {}).get("Code", "unknown"))
    return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _kind(error: Exception) -> str:
    """Return a few words for a silence; the errors themselves may carry addresses with credentials."""
    name = type(error).__name__
    words = {
        "EndpointConnectionError": "no connection",
        "ConnectTimeoutError": "no connection in time",
        "ReadTimeoutError": _NO_ANSWER,
        "FSTimeoutError": _NO_ANSWER,
        "ConnectionClosedError": "the connection was closed",
        "SSLError": "no TLS connection",
        "ClientPayloadError": "its answer broke off",
        "ProtocolError": "its answer broke off",
        "ResponseStreamingError": "its answer broke off",
        "CredentialRetrievalError": "our keys could not be fetched",
    }
    return words.get(name, name)
