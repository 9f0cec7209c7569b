"""What an S3 server's refusals and silences mean."""

from __future__ import annotations

from contextlib import suppress
from textwrap import shorten
from typing import Any, Self
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

from infra.errors import StoreError, StoreNotReadyError, is_untrusted

REQUEST_ERRORS = (OSError, BotoCoreError, ClientError, ResponseParserError, AioHttpError, Urllib3Error)
"""All that a request may raise: what breaks off in the body of an answer is not always botocore's own error."""
FORBIDDEN = {"AccessDenied", "AllAccessDisabled", "403"}
CONDITION_FAILED = {"PreconditionFailed", "412", "NotImplemented", "501"}
"""Those of S3 that know no conditions refuse each of them."""
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
"""It passes, but not within a request: the clock of a machine that has just woken is soon set by NTP."""
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
    CredentialRetrievalError,  # whoever hands them out is away
)
"""Those of botocore; its others complain of our settings."""


class RefusedError(StoreError):
    """The server answered, and said no; `code` is S3's word for why."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Say how it is made again in another process: Exception would hand over the message alone."""
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
        "ReadTimeoutError": "no answer in time",
        "FSTimeoutError": "no answer in time",
        "ConnectionClosedError": "the connection was closed",
        "SSLError": "no TLS connection",
        "ClientPayloadError": "its answer broke off",
        "ProtocolError": "its answer broke off",
        "ResponseStreamingError": "its answer broke off",
        "CredentialRetrievalError": "our keys could not be fetched",
    }
    return words.get(name, name)
