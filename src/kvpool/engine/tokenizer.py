"""Text to tokens and back, with the tables and the chat template inside the GGUF file.

Two families cover the Llama-architecture files there are:

    tokenizer.ggml.model  splits text by             merges
    gpt2                  a regular expression that  listed in the file, over bytes that are
                          tokenizer.ggml.pre names   written as printable characters
    llama                 nothing                    in the order of the pieces' scores, over
                                                     characters; unknown ones as <0xNN> bytes

Encoding is the ``tokenizers`` library's; decoding is a table of bytes, so that a character spread
over several tokens comes out whole while an answer streams.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from .errors import MissingPackage, ModelFileError
from .gguf_file import ModelFile

try:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer
except ImportError as error:
    raise MissingPackage.named(error.name) from error

__all__ = ["TokenStream", "Tokenizer"]

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """The tokenizer of one model file.

    Attributes:
        stop_tokens: ids that end an answer.
        has_chat_template: whether the file says how to write a conversation.

    Raises:
        ModelFileError: tables are missing or disagree, or the kind of tokenizer is not known here.
    """

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._pieces: list[str] = file.get("tokenizer.ggml.tokens", list)
        n = len(self._pieces)
        self._types: list[int] = file.get("tokenizer.ggml.token_type", list, [_NORMAL] * n)
        if len(self._types) != n:
            raise file.error(f"{n} tokens, but {len(self._types)} token types")
        kind = file.get("tokenizer.ggml.model", str)
        self._is_spm = kind == "llama"
        if kind not in ("gpt2", "llama"):
            raise file.error(f"its tokenizer is {kind!r}; this engine knows 'gpt2' and 'llama'")
        self._space_prefix = self._is_spm and file.get(
            "tokenizer.ggml.add_space_prefix", bool, True
        )
        self._bos = self._special_id("bos")
        self._add_bos: bool = file.get("tokenizer.ggml.add_bos_token", bool, self._is_spm)
        ends = (self._special_id(name) for name in ("eos", "eot", "eom"))
        self.stop_tokens = frozenset(token for token in ends if token is not None)
        self._template: str | None = file.get("tokenizer.chat_template", str, None)
        self.has_chat_template = self._template is not None
        try:
            self._fast = self._build_spm() if self._is_spm else self._build_gpt2()
        except ModelFileError:
            raise
        # The library raises a bare Exception for a merge of unknown tokens, and tables of the wrong
        # kind fail in many ways.
        except Exception as error:
            raise file.error(f"its tokenizer tables are inconsistent ({error})") from error
        self._bytes = self._byte_table()

    def _special_id(self, name: str) -> int | None:
        token: int | None = self._file.get(f"tokenizer.ggml.{name}_token_id", int, None)
        if token is not None and not 0 <= token < len(self._pieces):
            raise self._file.error(f"{name}_token_id is {token} of {len(self._pieces)} tokens")
        return token

    # ---- building -------------------------------------------------------------------------------

    def _build_gpt2(self) -> FastTokenizer:
        merges: list[tuple[str, str]] = []
        for line in self._file.get("tokenizer.ggml.merges", list):
            left, _, right = line.partition(" ")
            merges.append((left, right))
        pre = self._file.get("tokenizer.ggml.pre", str, "gpt-2")
        whole_words = pre in ("llama-bpe", "llama3", "llama-v3")  # a known word is never merged
        fast = FastTokenizer(
            models.BPE(vocab=self._vocabulary(), merges=merges, ignore_merges=whole_words)
        )
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole_words)
        if whole_words:
            split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
            fast.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        elif pre == "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            fast.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        elif pre in ("gpt-2", "gpt2", "default"):
            fast.pre_tokenizer = byte_level
        else:
            raise self._file.error(f"its pre-tokenizer {pre!r} is not known to this engine")
        return self._with_added_tokens(fast)

    def _build_spm(self) -> FastTokenizer:
        """Pieces with scores as merges: the pair that makes the best piece is merged first."""
        scores = self._file.get("tokenizer.ggml.scores", list)
        vocabulary = self._vocabulary()
        merges: list[tuple[float, int, int, str, str]] = []
        for piece, kind, score in zip(self._pieces, self._types, scores, strict=True):
            if kind != _NORMAL:
                continue
            for cut in range(1, len(piece)):
                left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
                if left is not None and right is not None:
                    merges.append((-score, left, right, piece[:cut], piece[cut:]))
        merges.sort()
        fast = FastTokenizer(
            models.BPE(
                vocab=vocabulary,
                merges=[(left, right) for *_, left, right in merges],
                byte_fallback=True,
                fuse_unk=True,
                unk_token=self._pieces[self._special_id("unknown") or 0],
            )
        )
        steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
        if self._space_prefix:
            steps.insert(0, normalizers.Prepend("\u2581"))
        fast.normalizer = normalizers.Sequence(steps)
        return self._with_added_tokens(fast)

    def _vocabulary(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self._pieces)}

    def _with_added_tokens(self, fast: FastTokenizer) -> FastTokenizer:
        fast.add_special_tokens(
            [
                AddedToken(piece, normalized=False, special=True)
                for piece, kind in zip(self._pieces, self._types, strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )
        return fast

    def _byte_table(self) -> list[bytes]:
        """The bytes of each token; none for control tokens, which are not text."""
        to_byte = {char: byte for byte, char in _printable_bytes().items()}
        table = []
        for piece, kind in zip(self._pieces, self._types, strict=True):
            if kind == _CONTROL:
                table.append(b"")
            elif kind == _USER_DEFINED:
                table.append(piece.encode())
            elif not self._is_spm:
                known = all(char in to_byte for char in piece)
                table.append(bytes(to_byte[c] for c in piece) if known else piece.encode())
            elif kind == _BYTE:
                table.append(bytes([int(piece[3:5], 16)]))
            else:
                table.append(piece.replace("\u2581", " ").encode())
        return table

    # ---- use ------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Special tokens written out in it (``<|im_end|>``) become themselves; the token that begins
        a text is put first if the model was trained with it.
        """
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        if self._add_bos and self._bos is not None and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without control tokens; bytes that are no UTF-8 become U+FFFD."""
        stream = TokenStream(self)
        return "".join(stream.feed(token) for token in tokens) + stream.end()

    def chat(self, prompt: str, system: str | None = None) -> list[int]:
        """The tokens of a conversation that waits for its first answer, by the file's template.

        Without a template: the system prompt, an empty line, the prompt.

        Raises:
            ModelFileError: the template cannot be rendered.
        """
        if self._template is None:
            return self.encode(f"{system}\n\n{prompt}" if system else prompt)
        messages = [{"role": "user", "content": prompt}]
        if system:
            messages.insert(0, {"role": "system", "content": system})

        def refuse(message: str) -> None:
            raise TemplateError(message)

        # The template is a program out of a downloaded file: it runs in Jinja's sandbox.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        eos = self._special_id("eos")
        try:
            text = environment.from_string(self._template).render(
                messages=messages,
                add_generation_prompt=True,
                raise_exception=refuse,
                bos_token="" if self._bos is None else self._pieces[self._bos],
                eos_token="" if eos is None else self._pieces[eos],
            )
        # Besides Jinja's own errors a template can run into any error of the values it handles.
        except Exception as error:
            raise self._file.error(f"its chat template cannot be rendered ({error})") from error
        return self.encode(text)

    def piece(self, token: int) -> bytes:
        """The bytes that one token stands for."""
        return self._bytes[token]

    @property
    def space_prefix(self) -> bool:
        """Whether a text begins with a space that was not in it."""
        return bool(self._space_prefix)


class TokenStream:
    """Decodes tokens one by one; a character that needs several tokens comes with the last one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.space_prefix

    def feed(self, token: int) -> str:
        """The text that is complete with this token; often a word, sometimes nothing."""
        data = self._tokenizer.piece(token)
        if self._drop_space and data:
            data, self._drop_space = data.removeprefix(b" "), False
        return self._utf8.decode(data)

    def end(self) -> str:
        """What is left: U+FFFD for a character that was cut off."""
        return self._utf8.decode(b"", final=True)


def _printable_bytes() -> dict[int, str]:
    """GPT-2's way to write each byte as a character: itself if printable, else one from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(0x100 + i) for i, byte in enumerate(others)})
    return table
