"""Text and jsonl files as batches of tokens: what the command line and the demo train on.

    tokens = load_tokens(["docs/", "more.jsonl"], ByteTokenizer())
    for batch in TokenBatches(tokens, batch=4, seq=128, seed=0):   # endless
        step(**batch)                                              # input_ids and labels, [4, 128] each

The labels are the input ids: Hugging Face models shift them by themselves.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")


class Tokenizer(Protocol):
    """What this module asks of a tokenizer; Hugging Face's have it."""

    @property
    def eos_token_id(self) -> int | None:
        """The token put after each document, if there is one."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Sequence[int]:
        """The tokens of a text."""


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as tokens, with NUL after each document."""

    eos_token_id: int = 0
    vocab_size: int = 256

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Sequence[int]:
        """The bytes of `text`."""
        return text.encode("utf-8", errors="replace")


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """The given files, and all text and jsonl files below the given folders, in a fixed order."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"no such file or folder: {path}")
    if not files:
        raise ValueError(f"no files to read: folders are searched for {', '.join(SUFFIXES)}")
    return files


def read_documents(file: Path) -> Iterator[str]:
    """The documents of one file: the "text" of each line of a .jsonl, the whole of any other."""
    if file.suffix != ".jsonl":
        yield file.read_text(encoding="utf-8", errors="replace")
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}:{number}: not JSON: {error}") from error
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise ValueError(f'{file}:{number}: expected an object with a "text" string')
            yield record["text"]


def load_tokens(paths: Iterable[str | Path], tokenizer: Tokenizer, limit: int | None = None) -> Tensor:
    """All tokens of the files in one int32 tensor, a document after the other, at most `limit` of them."""
    parts: list[Tensor] = []
    total = 0
    for file in find_files(paths):
        for document in read_documents(file):
            ids = list(tokenizer.encode(document, add_special_tokens=False))
            if tokenizer.eos_token_id is not None:
                ids.append(tokenizer.eos_token_id)
            parts.append(torch.tensor(ids, dtype=torch.int32))
            total += len(ids)
            if limit is not None and total >= limit:
                return torch.cat(parts)[:limit]
    return torch.cat(parts)


@dataclass(frozen=True)
class TokenBatches:
    """Endless batches of windows of `seq` tokens: every window once an epoch, in an order given by the seed.

    With `start`, the batches before that one are left out: what follows is what followed them.
    """

    tokens: Tensor
    batch: int
    seq: int
    seed: int = 0
    start: int = 0

    def __post_init__(self) -> None:
        if self.tokens.numel() < self.batch * self.seq:
            raise ValueError(
                f"the data has {self.tokens.numel()} tokens, fewer than one batch of {self.batch} x {self.seq}: "
                "give more data, or a smaller batch or sequence"
            )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        windows = self.tokens[: self.tokens.numel() // self.seq * self.seq].view(-1, self.seq)
        epochs, first = divmod(self.start, len(windows) // self.batch)
        for _ in range(epochs):
            torch.randperm(len(windows), generator=generator)
        while True:
            order = torch.randperm(len(windows), generator=generator)
            for index in range(first, len(windows) // self.batch):
                ids = windows[order[index * self.batch : (index + 1) * self.batch]].long()
                yield {"input_ids": ids, "labels": ids.clone()}
            first = 0

    def fingerprint(self) -> int:
        """A checksum of all tokens: other text has another one."""
        return zlib.crc32(self.tokens.numpy().tobytes())
