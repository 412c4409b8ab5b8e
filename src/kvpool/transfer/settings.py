"""How two sides connect: certificates, tokens, deadlines, keepalive, sizes."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from ..errors import InvalidArgument, TransferError
from .limits import MAX_PAYLOAD_BYTES, check_numbers

__all__ = ["ClientSettings", "ClientTls", "PushResult", "ServerTls", "keep_freed_memory"]

SERVICE = "tl.kv.v1.KvTransferService"
HANDOVER = "kvpool.handover.v1.Handover"
HEALTH = "grpc.health.v1.Health"
#: gRPC's own limit of 4,194,304 bytes is for the whole message; this is what stands around a
#: payload at most: tags, lengths, numbers, a handle.
MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + 4096

log = logging.getLogger("kvpool.transfer")


class PushResult(NamedTuple):
    """What became of a push.

    ``handle_id`` is what the decode side claims; ``bytes_sent`` counts payloads, of every attempt;
    ``attempts`` streams were opened.
    """

    handle_id: str
    n_blocks: int
    blocks_sent: int
    blocks_deduped: int
    bytes_sent: int
    attempts: int


@dataclass(frozen=True)
class ServerTls:
    """A server's certificate chain and private key, PEM; with ``client_ca`` mutual TLS.

    ``client_ca``: the certificates that must have signed a client's, PEM.
    """

    certificate: bytes
    key: bytes
    client_ca: bytes | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """For ``add_secure_port``."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)],
            root_certificates=self.client_ca,
            require_client_auth=self.client_ca is not None,
        )


@dataclass(frozen=True)
class ClientTls:
    """What a client trusts, and with mutual TLS who it is; all PEM.

    ``ca`` None: the roots that gRPC comes with. ``server_name``: what the certificate must be for,
    where that is not the name in the target.
    """

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """For ``secure_channel``."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


@dataclass(frozen=True)
class ClientSettings:
    """Deadlines, retries and keepalive of a client, as gRPC knows them.

    Seconds are from 0.001 to 1,000,000.

    Args:
        push_timeout_s: the deadline of a whole push, all its attempts together.
        rpc_timeout_s: of HasBlocks and of Release.
        max_attempts: of a call that fails with UNAVAILABLE, the first one included. A push is tried
            again as a whole, in a new stream, after its handle was released.
        backoff_s, max_backoff_s: the first pause between attempts; it doubles, up to the other.
        keepalive_time_s, keepalive_timeout_s: a ping after so many seconds of silence during a
            call, and how long its answer may take.
    """

    push_timeout_s: float = 60.0
    rpc_timeout_s: float = 10.0
    max_attempts: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    keepalive_time_s: float = 20.0
    keepalive_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        check_numbers(self, 0.001, 1e6)  # gRPC counts milliseconds in 32 bits

    def channel_options(self, tls: ClientTls | None) -> list[tuple[str, Any]]:
        """For a channel. HasBlocks and Release change nothing, so gRPC itself may repeat them."""
        retry = {
            "maxAttempts": min(max(self.max_attempts, 2), 5),
            "initialBackoff": f"{self.backoff_s:.3f}s",
            "maxBackoff": f"{max(self.max_backoff_s, self.backoff_s):.3f}s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        names = [{"service": SERVICE, "method": method} for method in ("HasBlocks", "Release")]
        config = {"methodConfig": [{"name": names, "retryPolicy": retry}]}
        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", 1 << 20),
            ("grpc.keepalive_time_ms", int(self.keepalive_time_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_timeout_s * 1000)),
            ("grpc.enable_retries", int(self.max_attempts > 1)),
            ("grpc.service_config", json.dumps(config)),
        ]
        if tls is not None and tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
        return options


def server_options(max_streams: int) -> list[tuple[str, Any]]:
    """For a server. What a stranger can make it hold before the token is looked at is small:
    metadata of 8 KiB and one flow-control window a stream, and no message is parsed."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", 1 << 20),
        ("grpc.max_concurrent_streams", max_streams),
        ("grpc.max_metadata_size", 8 * 1024),
        ("grpc.absolute_max_metadata_size", 16 * 1024),
        ("grpc.so_reuseport", 0),  # a second server on the port is an error
        ("grpc.keepalive_time_ms", 30_000),  # finds peers that are gone without a word
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # a client's keepalive is welcome
        ("grpc.server_handshake_timeout_ms", 10_000),
    ]


def is_loopback(address: str) -> bool:
    """Whether only this machine can connect to a listening address.

    >>> is_loopback("127.0.0.1:0"), is_loopback("[::1]:80"), is_loopback("unix:/tmp/s")
    (True, True, True)
    >>> is_loopback("0.0.0.0:80"), is_loopback("[::]:80"), is_loopback("decode.example:80")
    (False, False, False)
    """
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(token: str | None) -> None:
    """InvalidArgument for a token that no header can carry. The text does not tell it."""
    if token is not None and not (
        isinstance(token, str) and token and token.isascii() and token.isprintable()
    ):
        raise InvalidArgument("token: expected printable ASCII, not empty")


def _check_form(address: str) -> None:
    """gRPC takes a port of 99999 for 34463, and an address without one for port 443."""
    if isinstance(address, str):
        scheme, _, path = address.partition(":")
        if scheme in ("unix", "unix-abstract"):
            if path:
                return
        else:
            host, _, port = address.rpartition(":")
            bare = host[1:-1] if host.startswith("[") and host.endswith("]") else None
            if (
                (host if bare is None else bare)
                and (bare is not None or ":" not in host)
                and not any(c.isspace() for c in host)
                and port.isascii()
                and port.isdecimal()
                and int(port[:6]) < 2**16
            ):
                return
    raise InvalidArgument(
        "address: expected HOST:PORT with a port from 0 to 65535 and an IPv6 host in brackets, or "
        f"unix:PATH, found {address!r}"
    )


def check_address(address: str, tls: ServerTls | None, token: str | None, insecure: bool) -> None:
    """Refuses to listen where strangers can connect and nothing asks who they are."""
    _check_form(address)
    check_token(token)
    if is_loopback(address):
        log.info("listening on %s, which only this machine can reach", address)
        return
    if tls is None and token is None and not insecure:
        raise InvalidArgument(
            f"{address} can be reached from elsewhere: give it TLS (--tls-cert) or a token "
            "(--token-file), or allow anybody to push with insecure=True (--insecure)"
        )
    if tls is None:
        log.warning(
            "listening on %s without TLS: K and V%s travel in clear",
            address,
            " and the token" if token is not None else "",
        )


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What a client sends with each call."""
    check_token(token)
    return () if token is None else (("authorization", f"Bearer {token}"),)


def is_allowed(token: str | None, metadata: Any) -> bool:
    """Whether a call carries the token; the time it takes does not depend on where they differ."""
    if token is None:
        return True
    found = b""
    for key, value in metadata or ():
        if key == "authorization":
            found = value if isinstance(value, bytes) else value.encode()
    return hmac.compare_digest(found, f"Bearer {token}".encode())


def listen(server: Any, address: str, tls: ServerTls | None) -> str:
    """Takes the address for a gRPC server; it, with the port that was taken.

    Raises TransferError for a port that is taken, or an address that is not ours. gRPC does not say
    which; it writes that to stderr.
    """
    cause: RuntimeError | None = None
    try:
        port = (
            server.add_insecure_port(address)
            if tls is None
            else server.add_secure_port(address, tls.credentials())
        )
    except RuntimeError as error:
        port, cause = 0, error
    if port == 0:
        pem = "" if tls is None else ", or are certificate and key no PEM, or not of each other"
        raise TransferError(
            f"cannot listen on {address}: is it in use, or not an address of this machine{pem}?"
        ) from cause
    return address if address.startswith("unix") else f"{address.rpartition(':')[0]}:{port}"


def keep_freed_memory(n_bytes: int = 256 << 20) -> bool:
    """Lets the C library keep up to so many freed bytes, in this whole process; True if it does.

    gRPC takes and frees several megabytes for each message of one. glibc returns them to the system
    and gets them again page by page, at some 150 page faults a message, which costs a receiver a
    quarter of its time. ``kvpool serve`` calls this; a library must not, so your engine decides.
    glibc only; the same as the variables ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_THRESHOLD_``.

    >>> keep_freed_memory() in (True, False)
    True
    """
    import ctypes

    trim_threshold, mmap_threshold = -1, -3  # <malloc.h>
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    kept = bool(mallopt(trim_threshold, ctypes.c_int(min(n_bytes, 2**31 - 1))))
    return bool(mallopt(mmap_threshold, ctypes.c_int(32 << 20))) and kept  # 32 MiB is its largest
