"""What an S3 server's refusals and silences mean, and how long we go on asking."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from aiohttp import ClientPayloadError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError

from infra.errors import StoreError

T = TypeVar("T")
log = logging.getLogger(__name__)

ATTEMPT_TIMEOUT_S = 100.0
LONGEST_PAUSE_S = 5.0
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
FORBIDDEN = {"AccessDenied", "403"}
_SERVER_ERRORS = 500
_TOO_MANY_REQUESTS = 429
_SILENCES = (
    BotoConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ClientPayloadError,
    ResponseParserError,
)


class RefusedError(StoreError):
    """The server answered, and said no; `code` is S3's word for why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Say how it is made again in another process: Exception would hand over the message alone."""
        return type(self), (str(self), self.code)


class Retrier:
    """Runs requests against one bucket until they are answered or the deadline has passed."""

    def __init__(self, endpoint_url: str | None, bucket: str, deadline_s: float) -> None:
        self._server = _server_name(endpoint_url)
        self._bucket = bucket
        self._deadline_s = deadline_s

    def run(self, what: str, attempt: Callable[[float], T], limit_s: float | None = None) -> T:
        """Return the attempt's result.

        Args:
            what: what is done, for the message ("writing keys/...").
            attempt: makes the request once, within the seconds that it is given.
            limit_s: a deadline of its own, in place of the usual one.

        Raises:
            RefusedError: if the server said no, in a way that does not pass.
            StoreError: if there was no answer until the deadline.
        """
        limit_s = self._deadline_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        pause_s = 0.1
        while True:
            left_s = deadline - time.monotonic()
            try:
                return attempt(max(0.1, min(ATTEMPT_TIMEOUT_S, left_s)))
            except (OSError, BotoCoreError, ClientPayloadError, ResponseParserError) as error:
                reason = self._reason_to_retry(error, what)
            left_s = deadline - time.monotonic()
            if left_s <= pause_s:
                raise StoreError(self._unanswered(what, limit_s, reason))
            log.debug("%s: %s, trying again", what, reason)
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _reason_to_retry(self, error: Exception, what: str) -> str:
        """Return why the error may pass; raise RefusedError or StoreError if it does not."""
        answer = error if isinstance(error, ClientError) else error.__cause__
        if isinstance(answer, ClientError):
            code, status = _code_and_status(answer.response)
            if status >= _SERVER_ERRORS or status == _TOO_MANY_REQUESTS or code in _PASSING_CODES:
                return f"it answered {code} ({status})"
            raise RefusedError(self._refusal(code, status, what), code) from None
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            raise StoreError(
                f"no access key for the S3 server {self._server}; set RLHF_S3_ACCESS_KEY and RLHF_S3_SECRET_KEY"
            ) from None
        if isinstance(error, _SILENCES) or not isinstance(error, BotoCoreError):
            return _kind(error)
        raise StoreError(f"the settings of the S3 store do not fit: {error}") from None

    def _refusal(self, code: str, status: int, what: str) -> str:
        server, bucket = self._server, self._bucket
        if code == "SignatureDoesNotMatch":
            return f"the S3 server {server} refuses our secret key; check RLHF_S3_SECRET_KEY"
        if code in {"InvalidAccessKeyId", "InvalidToken", "ExpiredToken"}:
            return f"the S3 server {server} does not know our access key; check RLHF_S3_ACCESS_KEY"
        if code == "NoSuchBucket":
            return (
                f"the S3 server {server} has no bucket {bucket!r}; create it with "
                f"`aws s3 mb s3://{bucket}` or name another in RLHF_STORE_URL"
            )
        if code == "RequestTimeTooSkewed":
            return f"the S3 server {server} and this machine differ on the time; set the clock"
        if code in FORBIDDEN:
            return f"the S3 server {server} forbids us {what} in the bucket {bucket!r}; ask for that permission"
        return f"the S3 server {server} refused {what} in the bucket {bucket!r} ({code}, status {status})"

    def _unanswered(self, what: str, limit_s: float, reason: str) -> str:
        return (
            f"the S3 server {self._server} did not answer within {limit_s:.0f} s while {what} in the bucket "
            f"{self._bucket!r} ({reason}); check that it runs and that RLHF_S3_ENDPOINT_URL is its address"
        )


def _code_and_status(response: Any) -> tuple[str, int]:
    code = str(response.get("Error", {}).get("Code", "unknown"))
    return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _kind(error: Exception) -> str:
    """Return a few words for a silence; the errors themselves may carry addresses with credentials."""
    name = type(error).__name__
    words = {
        "EndpointConnectionError": "no connection",
        "ConnectTimeoutError": "no connection in time",
        "ReadTimeoutError": "no answer in time",
        "FSTimeoutError": "no answer in time",
        "ConnectionClosedError": "the connection was closed",
    }
    return words.get(name, name)


def _server_name(endpoint_url: str | None) -> str:
    """Return what messages call the server, once its address is seen to be one, and to hold no credentials."""
    if not endpoint_url:
        return "of AWS"
    parts = urlsplit(endpoint_url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        raise StoreError(
            "the address of the S3 server (RLHF_S3_ENDPOINT_URL) must be http://host:port or https://host:port; "
            "keys are set in RLHF_S3_ACCESS_KEY and RLHF_S3_SECRET_KEY"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path}"
