"""`oomc plan`: what a model's training step takes on a machine, without the machine and without weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from oomc.errors import BudgetError
from oomc.estimate import OPTIMIZERS, Estimate, Estimator
from oomc.machine import DEFAULTS
from oomc.plan import Budget, format_bytes, parse_bytes
from oomc.report import check_endings

CONTEXTS = (4096, 16384, 65536, 262144, 1048576)
"""Tokens of a sequence in a sweep."""
DEVICE_BUDGETS = ("24GiB", "48GiB", "80GiB")
"""Of a sweep, as far as the machine has them; all that it has is one more."""


def add_command(commands: Any, positive: Callable[[str], int]) -> None:
    """Add the command and its options; `positive` reads an integer of at least 1."""
    one = commands.add_parser(
        "plan",
        help="will a model fit, and how fast is its step? needs no GPU and no weights",
        description="Plan a model's training step for a machine, without a GPU and without weights. Exits with 2 where "
        "the budget cannot work, and says what would be needed.",
    )
    one.add_argument("model", help="a published model's name (Qwen3-30B-A3B, ...), or a config.json or its directory")
    one.add_argument("--machine", metavar="NAME", help=f"{', '.join(DEFAULTS)}, or a saved one (default: this one)")
    one.add_argument("--device-budget", metavar="SIZE", help='device memory, as "24GiB" (default: all of it)')
    one.add_argument("--host-budget", metavar="SIZE", help='host memory, as "420GiB" (default: all of it)')
    one.add_argument("--batch", type=positive, default=1, help="sequences a step (default: %(default)s)")
    one.add_argument("--seq", type=positive, default=4096, help="tokens a sequence (default: %(default)s)")
    one.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="default: %(default)s")
    one.add_argument("--state", choices=["fp32", "bf16", "8bit"], default="fp32", help="of adamw (%(default)s)")
    one.add_argument("--clip", type=float, metavar="NORM", help="the gradient's global norm is clipped")
    one.add_argument("--updates", choices=["host", "device"], help="who updates state on the host (default: both)")
    one.add_argument("--backend", choices=["eager", "inductor"], default="eager", help="default: %(default)s")
    one.add_argument("--json", metavar="FILE", help="where to write all figures")
    one.add_argument("--html", metavar="FILE", help="where to write a page: lanes, memory, limits, decisions")
    one.add_argument("--trace", metavar="FILE", help="where to write a .trace.json, for ui.perfetto.dev")
    one.add_argument("--sweep", action="store_true", help="a table over contexts and device budgets instead")


def run(args: argparse.Namespace) -> int:
    """Print the plan or the sweep; the exit code: 0, or 2 for a sweep in which nothing fits.

    Raises:
        BudgetError: the budget cannot work (not in a sweep).
        ValueError, UnsupportedError, CaptureError: as `oomc.plan`.
    """
    budget = Budget(args.device_budget, args.host_budget)
    if args.sweep and (args.html or args.trace):
        raise ValueError("--html and --trace show one plan; leave out --sweep")
    check_endings({".html": args.html, ".trace.json": args.trace})
    if args.sweep and budget.device is not None:
        raise ValueError("--sweep tries device budgets of its own; leave out --device-budget")
    estimator = Estimator(
        args.model,
        machine=args.machine,
        optimizer=args.optimizer,
        state=args.state,
        max_grad_norm=args.clip,
        updates=args.updates,
        backend=args.backend,
    )
    if args.sweep:
        cells = sweep(estimator, CONTEXTS, device_budgets(estimator), args.batch, budget.host)
        write(args.json, {"cells": [cell.as_dict() for cell in cells]})
        print(describe(estimator, cells, args.batch))
        return 0 if any(isinstance(cell.result, Estimate) for cell in cells) else 2
    try:
        estimate = estimator.estimate(budget, args.batch, args.seq)
    except BudgetError as error:
        write(args.json, shortage(error))
        raise
    write(args.json, estimate.as_dict())
    for path in filter(None, (args.html, args.trace)):
        estimate.report().save(path)
    print(estimate)
    return 0


def write(path: str | None, figures: dict[str, Any]) -> None:
    """Write figures as JSON, if they are wanted."""
    if path is not None:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def shortage(error: BudgetError) -> dict[str, Any]:
    """What a budget lacks, in bytes and in words."""
    return {
        "fits": False,
        "error": str(error),
        "smallest_device": error.smallest_device,
        "smallest_host": error.smallest_host,
    }


@dataclass(frozen=True)
class Cell:
    """One plan of a sweep: context in tokens, device budget in bytes, and what came out."""

    context: int
    device: int
    result: Estimate | BudgetError

    def as_dict(self) -> dict[str, Any]:
        """All figures."""
        figures = self.result.as_dict() if isinstance(self.result, Estimate) else shortage(self.result)
        return {"context": self.context, "device_budget": self.device} | figures

    def __str__(self) -> str:
        if isinstance(self.result, Estimate):
            return f"{self.result.step_s:.2f} s, {self.result.tokens_per_s:,.0f}/s"
        if self.result.smallest_host is not None:
            return f"host needs {format_bytes(self.result.smallest_host)}"
        return f"needs {format_bytes(self.result.smallest_device or 0)}"


def device_budgets(estimator: Estimator) -> list[int]:
    """Device budgets of a sweep on the estimator's machine, ascending."""
    whole = estimator.machine.device_memory
    sizes = [parse_bytes(text) for text in DEVICE_BUDGETS]
    return [*(size for size in sizes if size is not None and size < whole), whole]


def sweep(
    estimator: Estimator, contexts: Sequence[int], devices: Sequence[int], batch: int, host: int | None
) -> list[Cell]:
    """A plan for each context and device budget (ascending), or why there is none."""
    cells: list[Cell] = []
    for context in contexts:
        known: BudgetError | None = None  # it names what is needed, whatever there is
        for device in devices:
            result: Estimate | BudgetError
            if known is not None and known.smallest_device is not None and device < known.smallest_device:
                result = known
            else:
                try:
                    result = estimator.estimate(Budget(device, host), batch, context)
                except BudgetError as error:
                    result = known = error
            cells.append(Cell(context, device, result))
    return cells


def describe(estimator: Estimator, cells: Sequence[Cell], batch: int) -> str:
    """A sweep as a table: seconds of a step and tokens/s, or what it needs."""
    devices = list(dict.fromkeys(cell.device for cell in cells))
    rows = []
    for context in dict.fromkeys(cell.context for cell in cells):
        rows.append([f"{batch} x {context}", *(str(cell) for cell in cells if cell.context == context)])
    header = ["tokens", *(format_bytes(device) for device in devices)]
    table = tabulate(rows, header, tablefmt="plain", stralign="right")
    return f"{estimator.name} on {estimator.machine.name}, by device budget\n{table}"
