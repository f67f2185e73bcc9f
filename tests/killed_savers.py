"""Saves that are killed, in processes of their own; run by tests/test_checkpoint_files.py.

    python -m tests.killed_savers DIRECTORY

torch is imported once; each saver is a fork. It saves to one place over and over, each time with other numbers, until
it is killed: by its parent after a random time, or by itself at one of its calls that touch the file system (Python
announces those to audit hooks): a random one of a save, a random one of those after the manifest, or a rename, of which
a replacement has three where there is no RENAME_EXCHANGE, as for half of the savers. After each kill the place
is loaded.
Prints a line for each kill, and ends with an error if what was loaded was not one of the saved states.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from oomc import checkpoint_files
from oomc.manifest import MANIFEST
from tests.checkpoint_cases import Run, same

KILLS = 50
WATCHED = ("os.", "shutil.", "ctypes.", "open")


def save_on(directory: Path, number: int, report: int, die_at: tuple[str, int] | None, exchange: bool) -> None:
    """Save states `number`, `number` + 1, ... until killed; report each number when it has been saved."""
    if not exchange:
        checkpoint_files.exchange = lambda a, b: False
    run, left = Run(blocks=("layers",)), die_at[1] if die_at is not None else -1
    counting = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left, counting
        if die_at is None or not event.startswith(WATCHED) or event == "os.kill":
            return
        counting = counting or (event == "open" and str(args[0]).endswith(MANIFEST) and args[1] == "w")
        if die_at[0] == "save" or (counting and (die_at[0] == "swap" or event == "os.rename")):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    run.fill(number)
    os.write(report, b"ready\n")
    sys.addaudithook(hook)
    while True:
        run.checkpoints.save(directory, {"number": number})
        os.write(report, f"{number}\n".encode())
        number += 1
        run.fill(number)


def kill_one(directory: Path, number: int, random_numbers: random.Random, index: int) -> tuple[list[int], str]:
    """Let a saver start at `number` and be killed; the numbers that it has saved, and how it was killed."""
    kind = ("time", "rename", "save", "swap")[index % 4]
    die_at = {
        "time": None,
        "save": ("save", random_numbers.randrange(90)),
        "swap": ("swap", random_numbers.randrange(30)),
        "rename": ("rename", index // 4 % 3),
    }
    exchange = index % 8 < 4
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_on(directory, number, write, die_at[kind], exchange)
        finally:
            os._exit(1)  # it must not go on as another parent
    os.close(write)
    with os.fdopen(read) as lines:
        assert lines.readline() == "ready\n"
        if kind == "time":
            time.sleep(random_numbers.random() * 0.5)
            os.kill(child, signal.SIGKILL)
        done = [int(line) for line in lines.read().split()]
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"the saver ended by itself: {status}"
    return done, f"{kind} {die_at[kind]} exchange={exchange}"


def main() -> None:
    torch.set_num_threads(1)  # a fork has one thread, and would wait for the others for ever
    directory = Path(sys.argv[1])
    reader, expected, random_numbers = Run(blocks=()), Run(), random.Random(0)
    reader.fill(0)
    reader.checkpoints.save(directory, {"number": 0})
    last = 0
    for index in range(KILLS):
        done, how = kill_one(directory, last + 1, random_numbers, index)
        siblings = len(list(directory.parent.iterdir())) - directory.exists()
        reader.fill(10**6)
        with reader.checkpoints.open(directory) as opened:
            found = opened.restore().progress["number"]
        expected.fill(found)
        saved = done[-1] if done else last
        print(f"KILL {how}: saved {done[-3:]}, found {found}, left {siblings} exists {directory.exists()}", flush=True)
        assert same(reader.snapshot(), expected.snapshot()), "what was loaded is none of the saved states"
        assert found in (saved, saved + 1), f"{found} is older than the last that was saved"
        last = found


if __name__ == "__main__":
    main()
