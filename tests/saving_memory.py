"""The memory that saving and loading take, in a process of its own; run by tests/test_checkpoint.py.

    python -m tests.saving_memory DIRECTORY

In a process that has run other tests, memory that they have left would be used again unseen, or go back meanwhile.
Prints the bytes of a block, and the most anonymous memory that a save, one in the background and a load have taken.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oomc.checkpoint_write import Files
from tests.checkpoint_cases import Peak, Run, load

SIZE = 1024


def main(directory: Path) -> None:
    """Save and load eight blocks, slowly enough that each is seen."""
    model = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16) for _ in range(8))
    run = Run(model, blocks=[f"{index}." for index in range(8)])
    for slab in run.slabs:
        for tensor in (slab.weights, slab.lo, *slab.state.values()):
            tensor.fill_(1)
    write = Files.write_tensors

    def slowly(*args: Any) -> None:
        time.sleep(0.01)
        write(*args)

    Files.write_tensors = slowly  # type: ignore[assignment, method-assign]
    print(run.checkpoints.buffer_bytes)
    for asynchronous in (False, True):
        with Peak() as peak:
            run.checkpoints.save(directory, {}, asynchronous=asynchronous).wait()
        print(peak.extra)
    with Peak() as peak:
        load(run, directory)
    print(peak.extra)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
