"""Directories that appear whole or not at all.

A checkpoint is written into a hidden sibling, `.<name>.saving-<12 hex digits>`, which its writer keeps locked: the lock
goes with the process, however it ends, so that whoever finds a sibling that is not locked may take it for left over.
When everything is on the disk it is swapped in:

    no checkpoint there yet     rename(sibling, name)
    one there                   renameat2(sibling, name, RENAME_EXCHANGE), and the sibling, now the old one, is deleted
    no RENAME_EXCHANGE          rename(name, another sibling), rename(sibling, name), and the old one is deleted

Only the last leaves a moment without anything of this name. Two complete siblings are there then, where `locate` looks;
the next `Draft` of the name moves the newer one there. Nothing complete is deleted unless a checkpoint has the name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from oomc.errors import CheckpointError
from oomc.manifest import MANIFEST, OWN, read_manifest

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_OWN_FILES = re.compile(
    rf"{OWN}|model-\d{{5}}-of-\d{{5}}\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json"
)
_SHADOWS = "model.safetensors"
"""What transformers would load in place of a checkpoint's shards."""


class Draft:
    """A checkpoint that is being written.

    Attributes:
        target: where it is to appear, symbolic links resolved.
        path: where to write it.

    Raises:
        CheckpointError: the target is something else than a checkpoint, or holds files that one cannot be beside of.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.target = Path(os.path.realpath(directory))
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if self.target.is_mount():
            raise CheckpointError(
                f"{self.target} is a mount point, which nothing can be renamed to; save to a folder in it"
            )
        foreign_entries(self.target)
        _recover(self.target)
        self.path, self._lock = _locked_sibling(self.target)
        (self.path / OWN).mkdir()

    def finish(self) -> None:
        """Bring it to the disk, and swap it in; the checkpoint that was there is deleted.

        Files in the target that are no part of a checkpoint (a tokenizer's) are taken along. The files of the draft
        have been synchronised by who wrote them.
        """
        for name in foreign_entries(self.target):
            if not (self.path / name).exists():
                _link(self.target / name, self.path / name)
        for directory in (self.path / OWN, self.path):
            sync(directory)
        old = _swap(self.path, self.target)
        sync(self.target.parent)
        if old is not None:
            delete(old)
        self._unlock()

    def discard(self) -> None:
        """Delete what has been written."""
        delete(self.path)
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:  # else its number may be another file's by now
            os.close(lock)


def foreign_entries(target: Path) -> list[str]:
    """What a directory that is to become or to be replaced by a checkpoint holds beside one, sorted.

    Raises:
        CheckpointError: it is a file, or holds something and no checkpoint, or weights that would be loaded instead.
    """
    if not target.exists():
        return []
    entries = sorted(entry.name for entry in target.iterdir()) if target.is_dir() else [target.name]
    if entries and not (target / MANIFEST).exists():
        raise CheckpointError(
            f"{target} is not empty and no checkpoint of oomc (it holds {entries[0]}), and will not be replaced; save "
            "to another place, or delete it first"
        )
    if _SHADOWS in entries:
        raise CheckpointError(
            f"{target} holds a checkpoint, and a {_SHADOWS} that is no part of it and would be loaded in its place; "
            "move that elsewhere"
        )
    return [entry for entry in entries if not _OWN_FILES.fullmatch(entry)]


def locate(directory: str | os.PathLike[str]) -> Path:
    """Where the checkpoint of this name is: there, or in a sibling if its replacement was interrupted.

    Raises:
        CheckpointError: nowhere.
    """
    target = Path(os.path.realpath(directory))
    if (target / MANIFEST).exists():
        return target
    complete = _newest(_siblings(target))
    if complete is None:
        raise CheckpointError(f"there is no checkpoint of oomc at {target}: it has no {MANIFEST}")
    return complete


def sync(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(directory: Path) -> None:
    """Delete a sibling, its manifest first, so that what is left after a kill is not taken for complete."""
    with suppress(OSError):
        (directory / MANIFEST).unlink()
    shutil.rmtree(directory, ignore_errors=True)


def exchange(a: Path, b: Path) -> bool:
    """Let two paths change their places at once; False if that failed, for want of support or otherwise."""
    function = getattr(ctypes.CDLL(None), "renameat2", None)
    if function is None:
        return False
    return bool(function(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_RENAME_EXCHANGE)) == 0)


def _swap(new: Path, target: Path) -> Path | None:
    """Give `new` the name `target`; where what had the name is now."""
    aside: Path | None = None
    while True:
        try:
            os.rename(new, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return aside
        if exchange(new, target):
            return new
        aside = _sibling(target)
        os.rename(target, aside)
        sync(target.parent)


def _sibling(target: Path) -> Path:
    return target.parent / f".{target.name}.saving-{uuid.uuid4().hex[:12]}"


def _siblings(target: Path) -> list[Path]:
    pattern = re.compile(re.escape(f".{target.name}.saving-") + "[0-9a-f]{12}")
    return [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)] if target.parent.exists() else []


def _newest(siblings: Iterable[Path]) -> Path | None:
    """The newest of those that hold whole checkpoints."""
    found = []
    for path in siblings:
        with suppress(CheckpointError):
            found.append((read_manifest(path).saved_ns, path))
    return max(found)[1] if found else None


def _recover(target: Path) -> None:
    """Finish an interrupted replacement, and delete what killed writers have left."""
    left = [(path, lock) for path in _siblings(target) if (lock := _lock(path)) is not None]
    if not (target / MANIFEST).exists():
        newest = _newest(path for path, _ in left)
        if newest is not None:
            os.rename(newest, target)
    for path, lock in left:
        delete(path)
        os.close(lock)


def _locked_sibling(target: Path) -> tuple[Path, int]:
    while True:
        path = _sibling(target)
        path.mkdir()
        lock = _lock(path)
        if lock is not None and path.exists():  # else another process has taken it for left over
            return path, lock


def _lock(path: Path) -> int | None:
    """Lock a directory: a descriptor that holds the lock until it is closed, or None if someone else has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks: one process at a time may save to a place there
        pass
    return descriptor


def _link(source: Path, target: Path) -> None:
    """Take a file or a folder along, by hard links where the file system has them."""

    def link(a: str, b: str) -> None:
        try:
            os.link(a, b, follow_symlinks=False)
        except OSError:
            shutil.copy2(a, b, follow_symlinks=False)

    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=link)
    else:
        link(str(source), str(target))
