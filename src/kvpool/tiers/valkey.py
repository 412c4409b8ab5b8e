"""Blocks in Valkey or Redis: one key a block, shared by every engine that knows the server.

    valkey://user@10.0.0.7:6379/0?ttl=86400&password_file=/run/secrets/valkey
    valkeys://...                     over TLS; redis:// and rediss:// mean the same
    valkey://a:6379,b:6379?cluster=yes
    valkey:///run/valkey.sock

    put    STRLEN of each key; SET of those that are not there in that length     two round trips
    get    GET of each key, into the caller's memory                              one
    has    EXISTS of each                                                         one

A batch is one pipeline. What a fleet shares is sent once, by whoever computes it first. Nobody can
make a reader take in more than a record: a longer value is refused before it is read. Of a cluster
GETRANGE reads, which ends there.

Under ``maxmemory`` either policy works: with ``noeviction`` a full server refuses, and ``put`` says
that the rest of the prefix is not kept; with ``allkeys-lru`` or ``allkeys-lfu`` it forgets old
blocks by itself. The server may lose anything at any time: a miss.

An ACL user needs ``~PREFIX* +get +strlen +exists +set +unlink +info``, ``+pexpire`` for a TTL,
``+getrange +cluster`` for a cluster and ``+scan`` for the tools.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote

from kvpool import InvalidArgument, TransferError

from ._resp import Replies, ReplyError, TooLong
from .record import Key
from .registry import Options, port
from .tier import Tier, TierStats

try:
    import redis
    from redis import exceptions
    from redis.backoff import NoBackoff
    from redis.cluster import ClusterNode, RedisCluster
    from redis.connection import PythonRespSerializer
    from redis.retry import Retry
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError("valkey tiers need redis: pip install 'kvpool[valkey]'") from error

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ValkeyTier", "open_url"]

_MOST_BYTES = 512 << 20  # of a value, by the protocol's default limit
_JOINED_BYTES = 16 << 10  # smaller values go out together with their commands
_INFO_S = 10.0  # how old what stats tells of the server may be


class ValkeyTier(Tier):
    """Records in a Valkey or Redis server, or in a cluster of them.

    Args:
        hosts: ``(host, port)`` of the server; of a cluster any nodes, the others are found.
        socket: path of a Unix socket instead of a host.
        db: number of the database; a cluster has only 0.
        cluster: whether the servers are a cluster.
        username, password: of an ACL user, or the password alone.
        tls: whether to connect over TLS; ``tls_options`` are ``ca`` (file of the authorities that
            are believed, else the system's), ``cert`` and ``key`` (files, for a server that asks
            for them) and ``verify`` (False believes any certificate).
        ttl_s: seconds after its last use (written or read) after which a block may go; None keeps
            it until the server evicts it.
        timeout_s: how long a connection, and each reply on it, is waited for.
        prefix: what every key begins with, where others use the database too.

    Raises:
        InvalidArgument: an option is out of range, or the server is (or is not) a cluster.
        TransferError: the server cannot be reached, or refuses.

    Errors of later calls are TransferErrors. A connection that has broken is opened again once
    within the call.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]] = (("localhost", 6379),),
        *,
        socket: str | None = None,
        db: int = 0,
        cluster: bool = False,
        username: str | None = None,
        password: str | None = None,
        tls: bool = False,
        tls_options: Mapping[str, Any] | None = None,
        ttl_s: float | None = None,
        timeout_s: float = 1.0,
        prefix: str = "",
    ) -> None:
        if ttl_s is not None and not 0.001 <= ttl_s < 1e9:
            raise InvalidArgument(f"ttl: expected 0.001 or more seconds, found {ttl_s}")
        if not 0 < timeout_s < 1e9:
            raise InvalidArgument(f"timeout: expected more than 0 seconds, found {timeout_s}")
        if not re.fullmatch(r"[A-Za-z0-9:_./-]*", prefix):
            raise InvalidArgument(
                f"prefix: expected letters, digits and any of :_./-, found {prefix!r}"
            )
        if cluster and (db or socket):
            raise InvalidArgument("cluster: expected hosts and database 0")
        where = socket or ",".join(f"{host}:{port}" for host, port in hosts)
        self._is_cluster = cluster
        self.name, self._prefix = f"valkey:{where}", prefix
        self._ttl_ms = None if ttl_s is None else int(ttl_s * 1000)
        self._counts = dict.fromkeys(("present", "full", "read_only", "foreign", "not_renewed"), 0)
        self._lock, self._reading = Lock(), Lock()
        self._is_closed = False
        self._info: tuple[float, int | None, int | None] = (0.0, None, None)
        common: dict[str, Any] = {
            "username": username,
            "password": password,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "protocol": 2,
            # one more try, on a new connection: the server may have been restarted since
            "retry": Retry(NoBackoff(), 1, (exceptions.ConnectionError,)),
        }
        at: dict[str, Any]
        secured = _tls(tls_options or {}) if tls else {}
        if cluster:
            with self._told("open"):
                nodes = [ClusterNode(host, port) for host, port in hosts]  # type: ignore[no-untyped-call]
                self._client: Any = RedisCluster(startup_nodes=nodes, ssl=tls, **secured, **common)
        elif len(hosts) != 1 and not socket:
            raise InvalidArgument(f"hosts: expected one, or a cluster (cluster=yes), found {where}")
        else:
            kind: Any
            if socket:
                kind, at = redis.UnixDomainSocketConnection, {"path": socket}
            else:
                kind = redis.SSLConnection if tls else redis.Connection
                at = {"host": hosts[0][0], "port": hosts[0][1], **secured}
            # The package's own packer for hiredis copies a value twice before it is sent.
            at["command_packer"] = PythonRespSerializer(6000, _encode)
            pool = redis.ConnectionPool(kind, db=db, **at, **common)
            self._client = redis.Redis(connection_pool=pool)
            self._connection: Any = kind(db=db, **at, **common)  # what get reads from
        try:
            with self._told("open"):
                is_cluster = self._look()
            if is_cluster and not cluster:
                raise InvalidArgument(f"{self.name} is part of a cluster: say cluster=yes")
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _told(self, call: str) -> Iterator[None]:
        try:
            yield
        except (exceptions.RedisError, OSError, ReplyError, ValueError) as error:
            raise TransferError(f"{self.name}: {call}: {type(error).__name__}: {error}") from error

    def _run(self, call: str, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The replies; what a command was refused with stands in its place."""
        if not commands:
            return []
        with self._told(call):
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies

    def _count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self._counts[what] += n

    def _name(self, key: Key) -> bytes:
        return (self._prefix + key.text).encode()

    def _refused(self, call: str, reply: Exception) -> TransferError:
        return TransferError(f"{self.name}: {call}: {type(reply).__name__}: {reply}")

    # ---- the protocol ----------------------------------------------------------------------------

    def put(self, items: Sequence[tuple[Key, Buffer]]) -> list[bool]:
        records = [memoryview(data).cast("B") for _, data in items]
        names = [self._name(key) for key, _ in items]
        lengths = self._run("put", [("STRLEN", name) for name in names])
        held = [length == len(data) for length, data in zip(lengths, records, strict=True)]
        self._count("present", sum(held))
        commands: list[tuple[Any, ...]] = []
        at: list[int] = []
        expires = () if self._ttl_ms is None else (b"PX", self._ttl_ms)
        for i, data in enumerate(records):
            if held[i]:
                if expires:
                    commands.append(("PEXPIRE", names[i], self._ttl_ms))
                    at.append(-1)
            elif len(data) <= _MOST_BYTES:
                value = data if len(data) >= _JOINED_BYTES else bytes(data)
                commands.append(("SET", names[i], value, *expires))
                at.append(i)
        for i, reply in zip(at, self._run("put", commands), strict=True):
            if i < 0:
                continue
            if isinstance(reply, (exceptions.OutOfMemoryError, exceptions.ReadOnlyError)):
                self._count(
                    "full" if isinstance(reply, exceptions.OutOfMemoryError) else "read_only"
                )
            elif isinstance(reply, Exception):
                raise self._refused("put", reply)
            else:
                held[i] = True
        if time.monotonic() - self._info[0] > _INFO_S:
            with self._told("put"):
                self._look()
        return held

    def get(
        self, keys: Sequence[Key], out: Sequence[memoryview] | None = None
    ) -> list[Buffer | None]:
        names = [self._name(key) for key in keys]
        views = [None] * len(keys) if out is None else list(out)
        if self._is_cluster:
            return self._get_from_cluster(names, views)
        records: list[Buffer | None] = []
        with self._told("get"), self._reading:
            while len(records) < len(names):
                rest = len(records)
                try:
                    self._read(names[rest:], views[rest:], records)
                except ConnectionError:  # of before, perhaps: once more, on a new one
                    if self._is_closed:
                        raise
                    del records[rest:]
                    self._read(names[rest:], views[rest:], records)
        return records

    def _read(
        self,
        names: Sequence[bytes],
        views: Sequence[memoryview | None],
        records: list[Buffer | None],
    ) -> None:
        """Adds the records to a list: all of them, or up to one that is too long."""
        commands: list[tuple[Any, ...]] = [("GET", name) for name in names]
        if self._ttl_ms is not None:
            commands += [("PEXPIRE", name, self._ttl_ms) for name in names]
        connection, is_done = self._connection, False
        try:
            connection.connect()
            connection.send_packed_command(connection.pack_commands(commands))
            replies = Replies(connection._sock)
            for view in views:
                reply = replies.value(view, _MOST_BYTES)
                if isinstance(reply, ReplyError):
                    if not str(reply).startswith("WRONGTYPE"):
                        raise reply
                    self._count("foreign")
                    reply = None
                records.append(reply or None)
            for _ in commands[len(names) :]:
                if isinstance(replies.number(), ReplyError):
                    self._count("not_renewed")
            is_done = replies.is_empty
        except TooLong:
            records.append(b"?")  # no record: whoever asked has it deleted
        except exceptions.ConnectionError as error:
            raise ConnectionError(str(error)) from error
        finally:
            if not is_done:
                connection.disconnect()  # or the next one would read the rest of these replies

    def _get_from_cluster(
        self, names: Sequence[bytes], views: Sequence[memoryview | None]
    ) -> list[Buffer | None]:
        # to one byte past what is expected, so that what is longer does not look right
        ends = [-1 if view is None else len(view) for view in views]
        commands: list[tuple[Any, ...]]
        commands = [("GETRANGE", name, 0, end) for name, end in zip(names, ends, strict=True)]
        if self._ttl_ms is not None:
            commands += [("PEXPIRE", name, self._ttl_ms) for name in names]
        records: list[Buffer | None] = []
        for reply in self._run("get", commands)[: len(names)]:
            if isinstance(reply, exceptions.ResponseError) and str(reply).startswith("WRONGTYPE"):
                self._count("foreign")
                reply = b""
            elif isinstance(reply, Exception):
                raise self._refused("get", reply)
            records.append(reply or None)
        return records

    def has(self, keys: Sequence[Key]) -> list[bool]:
        return self._each("has", "EXISTS", keys)

    def delete(self, keys: Sequence[Key]) -> list[bool]:
        return self._each("delete", "UNLINK", keys)

    def _each(self, call: str, command: str, keys: Sequence[Key]) -> list[bool]:
        replies = self._run(call, [(command, self._name(key)) for key in keys])
        for reply in replies:
            if isinstance(reply, Exception):
                raise self._refused(call, reply)
        return [bool(reply) for reply in replies]

    def keys(self) -> Iterator[Key]:
        with self._told("keys"):
            for name in self._client.scan_iter(match=f"{self._prefix}tlkv1-*", count=1000):
                key = self._parsed(name)
                if key is not None:
                    yield key

    def _parsed(self, name: bytes) -> Key | None:
        try:
            return Key.parse(name.decode()[len(self._prefix) :])
        except (InvalidArgument, UnicodeDecodeError):
            return None  # somebody else's

    def _look(self) -> bool:
        """Asks the servers for their memory; whether they are a cluster."""
        try:
            if self._is_cluster:
                answers = self._client.info(target_nodes=RedisCluster.PRIMARIES)
                infos = list(answers.values()) if "used_memory" not in answers else [answers]
            else:
                infos = [self._client.info()]
        except exceptions.NoPermissionError:
            self._info = (time.monotonic(), None, None)
            return self._is_cluster
        used = sum(int(info.get("used_memory", 0)) for info in infos)
        limits = [int(info.get("maxmemory", 0)) for info in infos]
        self._info = (time.monotonic(), used, sum(limits) if all(limits) else None)
        return any(info.get("cluster_enabled") for info in infos)

    def stats(self) -> TierStats:
        """Sizes are of the whole server or cluster, as of the last seconds in which blocks were
        written; no call goes out. Counts: ``present`` (blocks that were there already), ``full``
        and ``read_only`` (blocks that the server did not take), ``foreign`` (keys with something
        else than a string), ``not_renewed`` (blocks whose TTL it did not let us renew)."""
        with self._lock:
            counts = dict(self._counts)
        return TierStats(None, self._info[1], self._info[2], counts)

    def close(self) -> None:
        self._is_closed = True
        if not self._is_cluster:
            self._connection.disconnect()
        client = self._client
        nodes = client.get_nodes() if self._is_cluster else []
        clients = [node.redis_connection for node in nodes] or [client]
        for each in clients:
            if isinstance(each, redis.Redis):
                each.connection_pool.disconnect()  # also what a call waits on


def _encode(value: Any) -> Any:
    return value if isinstance(value, (bytes, memoryview)) else str(value).encode()


def _tls(options: Mapping[str, Any]) -> dict[str, Any]:
    verify = options.get("verify", True)
    return {
        "ssl_ca_certs": options.get("ca") or None,
        "ssl_certfile": options.get("cert") or None,
        "ssl_keyfile": options.get("key") or None,
        "ssl_cert_reqs": "required" if verify else "none",
        "ssl_check_hostname": verify,
    }


def open_url(url: SplitResult, options: Options) -> ValkeyTier:
    """``valkey://user:password@host:port/db?ttl=..``; see the module."""
    if url.netloc and "@" in url.path:  # of a password, perhaps: it is not shown
        raise InvalidArgument(
            f"{url.scheme}: expected %2F for a / in the user's name or password, found a / before @"
        )
    user, _, where = url.netloc.rpartition("@")
    name, _, password = user.partition(":")
    hosts = []
    for part in where.split(",") if where else []:
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(\d{1,5}))?", part)
        if match is None:
            raise InvalidArgument(f"{url.scheme}: expected host:port, found {part!r}")
        hosts.append((match[1].strip("[]"), port(url.scheme, match[2], 6379)))
    path = url.path.strip("/")
    if where and not re.fullmatch(r"\d{0,4}", path):
        raise InvalidArgument(
            f"{url.scheme}: expected /database after the host, found {url.path!r}"
        )
    if not where and not path:
        raise InvalidArgument(f"{url.scheme}: expected //host:port or ///path/of/socket")
    ttl, timeout = options.seconds("ttl", 0), options.seconds("timeout", 1)
    prefix, cluster = options.text("prefix"), options.flag("cluster")
    file = options.text("password_file")
    tls = url.scheme in ("valkeys", "rediss")
    tls_options: dict[str, Any] = {}
    if tls:
        tls_options = {name: options.text(name) for name in ("ca", "cert", "key")}
        tls_options["verify"] = options.flag("verify", True)
    options.done()
    if file and password:
        raise InvalidArgument(f"{url.scheme}: password_file: there is a password in the URL too")
    try:
        secret = Path(file).read_text().strip() if file else unquote(password)
    except (OSError, ValueError) as error:  # of what is in it nothing is told
        why = getattr(error, "strerror", None) or "no text"
        raise InvalidArgument(f"{url.scheme}: password_file: {file}: {why}") from None
    return ValkeyTier(
        hosts or [("localhost", 6379)],
        socket=None if where else url.path,
        db=int(path or 0) if where else 0,
        cluster=cluster,
        username=unquote(name) or None,
        password=secret or None,
        tls=tls,
        tls_options=tls_options,
        ttl_s=ttl or None,
        timeout_s=timeout,
        prefix=prefix,
    )
