"""Roots for prefix chains: what a prompt's first block is computed under, as one number.

The same tokens give other K and V under another model, revision, adapter or image, and must not be
shared between tenants that asked to be kept apart. The block hash of the format has a place for
that already: the parent of block 0, which is 0 by default. A namespace is a number to put there.

    root = namespace(model="m", adapter="x")          0 when nothing is given
    h0   = fnv1a64(le64(root) || tokens of block 0)   the format's rule, unchanged
    h1   = fnv1a64(le64(h0)   || tokens of block 1)   every later block inherits it

So the envelope carries nothing new, an engine that has never heard of namespaces reads it, and two
engines that agree on the fields share blocks without agreeing on anything else.

Derivation. The root is BLAKE2b with a digest of 8 bytes, no key, and the personalization
``kvpool.namespace``, read as a little-endian integer; 0 becomes 1, as for a block hash. It is taken
over the fields that are given, in the order of their tags:

    field = tag (1 byte) || value
    value = kind (1 byte) || length (8 bytes, little-endian) || content
    model 1, revision 2, adapter 3, salt 4, images 5
    kind 1: str, as UTF-8      kind 2: bytes
    kind 3: int, two's complement, little-endian, in bit_length // 8 + 1 bytes
    kind 4: a list: its length is the number of values, its content the values one after another

Tags make the order of the arguments irrelevant and keep adapter "x" apart from salt "x"; lengths
keep ("ab", "c") apart from ("a", "bc"); kinds keep 1, "1" and b"1" apart. The encoding can be read
back without ambiguity, so different fields are different inputs, and only a collision of the hash
could join them: by chance with probability q^2 / 2^65 for q namespaces.

Why a strong hash here, when the block hash is FNV-1a: a salt or an image is often chosen by a
client. Under FNV-1a a client would compute a salt that lands on another tenant's root in a fraction
of a second, and its blocks would carry the tenant's own names. Under BLAKE2b the aim takes 2^64
trials, divided by the number of roots that are worth hitting. It has no key because the root must
be the same in every process; what depends on a secret is the proof behind each hit
(docs/design/prefix-proof.md), and that starts from the root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from .errors import ArgumentTypeError, InvalidArgument

__all__ = ["namespace"]

Field = str | bytes | int

_TAGS = {"model": 1, "revision": 2, "adapter": 3, "salt": 4, "images": 5}
_STR, _BYTES, _INT, _LIST = 1, 2, 3, 4


def _value(kind: int, length: int, content: bytes) -> bytes:
    return bytes([kind]) + length.to_bytes(8, "little") + content


def _scalar(name: str, value: object) -> bytes:
    if isinstance(value, str):
        try:
            content = value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"namespace: {name} is not valid Unicode: {error.reason} at position {error.start}"
            ) from None
        kind = _STR
    elif isinstance(value, bytes):
        kind, content = _BYTES, value
    elif isinstance(value, int) and not isinstance(value, bool):
        kind, content = _INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    else:
        raise ArgumentTypeError(
            f"namespace: {name}: expected str, bytes or int, found {value!r} "
            f"({type(value).__name__})"
        )
    if not content:
        raise InvalidArgument(f"namespace: {name} is empty; leave it out if there is none")
    return _value(kind, len(content), content)


def _list(name: str, values: object) -> bytes:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ArgumentTypeError(
            f"namespace: {name}: expected a list of str, bytes or int, found {values!r} "
            f"({type(values).__name__})"
        )
    items = [_scalar(f"{name}[{i}]", value) for i, value in enumerate(values)]
    return _value(_LIST, len(items), b"".join(items)) if items else b""


def namespace(
    *,
    model: Field | None = None,
    revision: Field | None = None,
    adapter: Field | None = None,
    salt: Field | None = None,
    images: Iterable[Field] | None = None,
) -> int:
    """The root parent hash for prompts computed under these fields: ``0 <= root < 2**64``.

    Give it to ``BlockManager.allocate(tokens, namespace=root)`` or to
    ``block_hashes(tokens, parent=root)``. Only prompts with equal roots share blocks.

    Args:
        model: the model's name.
        revision: the revision of its weights. After an update in place another revision, or
            ``BlockManager.reset``, keeps old K and V from being found.
        adapter: the LoRA adapter, by name or id.
        salt: a tenant's own value: tenants with different salts never share blocks.
        images: what identifies each image (or other input that is not tokens) of the prompt, a
            content hash for example, in the order of the prompt. It separates the whole prompt,
            text before the first image included.

    Each field is a ``str``, ``bytes`` or ``int``, and the kinds differ: ``salt="1"`` is not
    ``salt=1``. None, and no images, is as if the field were left out. With no field at all the root
    is 0, the format's default; otherwise it is never 0. The result is the same in every process,
    on every machine and in every release.

    Raises:
        ArgumentTypeError: a field of another type, ``bool`` and ``float`` among them.
        InvalidArgument: an empty field, or a ``str`` with a lone surrogate.

    Source: seed section 2.3 (the parent of block 0); the derivation is at the top of this module.

    >>> import kvpool
    >>> kvpool.namespace()
    0
    >>> root = kvpool.namespace(model="SmolLM2-135M", adapter="sql")
    >>> f"{root:#018x}"
    '0xf0d93a4c4376325d'
    >>> root == kvpool.namespace(adapter="sql", model="SmolLM2-135M")
    True
    >>> kvpool.namespace(adapter="x") == kvpool.namespace(salt="x")
    False
    >>> kvpool.block_hashes(range(16), parent=root) == kvpool.block_hashes(range(16))
    array([False])
    """
    fields = {"model": model, "revision": revision, "adapter": adapter, "salt": salt}
    encoded = {name: _scalar(name, value) for name, value in fields.items() if value is not None}
    if images is not None:
        encoded["images"] = _list("images", images)
    message = b"".join(bytes([_TAGS[name]]) + value for name, value in encoded.items() if value)
    if not message:
        return 0
    digest = hashlib.blake2b(message, digest_size=8, person=b"kvpool.namespace").digest()
    return int.from_bytes(digest, "little") or 1
