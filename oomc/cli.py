"""The command line: `oomc train`, `oomc plan`, `oomc report` and `oomc calibrate`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import oomc
from oomc import cli_plan
from oomc.checkpoint_files import foreign_entries, locate
from oomc.data import ByteTokenizer, TokenBatches, Tokenizer, load_tokens
from oomc.errors import OomcError
from oomc.report import ENDINGS, check_ending, check_endings

# Qwen3-MoE architectures with random weights. The first two read bytes; the last has its published sizes.
PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-moe-tiny": {  # 0.9 M parameters
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "intermediate_size": 128,
    },
    "qwen3-moe-small": {  # 27 M parameters
        "vocab_size": 256,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "intermediate_size": 512,
    },
    "qwen3-moe-30b-a3b": {  # 30.5 G parameters
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    },
}


# torch's optimizers with what differs here from their defaults.
OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 1e-4}),
}

BROKEN_PIPE = 128 + 13
"""What the shell says of a program that SIGPIPE has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 for what the message explains: a mistake, no budget."""
    args = make_parser().parse_args(argv)
    code = 0
    try:
        if args.command == "train":
            train(args)
        elif args.command == "calibrate":
            print(calibrated(args.device, args.force, args.host))
        elif args.command == "plan":
            code = cli_plan.run(args)
        else:
            print(report_of(args))
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever reads has seen enough (`oomc report ... | head`); what is still to be written at exit goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (OomcError, ValueError, OSError) as error:
        print(f"oomc: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return code


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(prog="oomc", description="Train models that do not fit, under a memory budget.")
    commands = parser.add_subparsers(dest="command", required=True)

    one = commands.add_parser("train", help="train a model on text", description="Train a causal language model.")
    one.add_argument("model", help=f"a Hugging Face model directory, or a preset: {', '.join(PRESETS)}")
    one.add_argument("--data", nargs="+", required=True, metavar="PATH", help="text or .jsonl files, or folders")
    one.add_argument("--device-budget", metavar="SIZE", help='device memory, as "24GiB" (default: all of it)')
    one.add_argument("--host-budget", metavar="SIZE", help='host memory, as "110GiB" (default: all of it)')
    one.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if there is one")
    one.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: the model's own (presets: by device)")
    one.add_argument("--steps", type=positive, default=100, help="updates, those before --resume too (%(default)s)")
    one.add_argument("--batch", type=positive, default=4, help="sequences a micro-batch (default: %(default)s)")
    one.add_argument("--seq", type=positive, default=512, help="tokens a sequence (default: %(default)s)")
    one.add_argument("--accumulate", type=positive, default=1, metavar="N", help="micro-batches a step (%(default)s)")
    one.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="default: %(default)s")
    one.add_argument("--lr", type=float, help="learning rate (default: 1e-4, or the resumed checkpoint's)")
    one.add_argument("--weight-decay", type=float, help="default: 0.01 for adamw, 0 for sgd, or the checkpoint's")
    one.add_argument("--momentum", type=float, help="of sgd (default: 0, or the checkpoint's)")
    one.add_argument(
        "--state", choices=["fp32", "bf16", "8bit"], default="fp32", help="of adamw (default: %(default)s)"
    )
    one.add_argument("--clip", type=float, metavar="NORM", help="clip the gradient's global norm to this")
    one.add_argument("--seed", type=int, default=0, help="of a preset's weights, dropout and the data's order")
    one.add_argument(
        "--checkpoint", metavar="DIR", help="where to save checkpoints: one at the end, and by --save-every"
    )
    one.add_argument("--save-every", type=positive, metavar="N", help="save a checkpoint every N steps, while they run")
    one.add_argument("--resume", metavar="DIR", help="go on exactly from this checkpoint, with the same model and data")
    one.add_argument("--save", metavar="DIR", help="where to save the trained model")
    one.add_argument("--report", metavar="PATH", help=f"where to save the report ({', '.join(ENDINGS)})")
    one.add_argument("--print-after", metavar="PASS", help="print the graph as it is after this pass")

    two = commands.add_parser("report", help="print a saved report, or make a page or a trace of it")
    two.add_argument("path", help="a report saved as .json or .txt")
    two.add_argument("--html", metavar="FILE", help="make a page of it: lanes, memory, limits, decisions")
    two.add_argument("--trace", metavar="FILE", help="make a .trace.json of it, for ui.perfetto.dev")

    three = commands.add_parser("calibrate", help="measure this machine's rates, which plans are made from")
    three.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU if there is one")
    again = three.add_mutually_exclusive_group()
    again.add_argument("--force", action="store_true", help="measure anew what has been measured before")
    again.add_argument(
        "--host", action="store_true", help="measure the link, host memory and updates anew: what other work moves"
    )  # fmt: skip

    cli_plan.add_command(commands, positive)
    return parser


def calibrated(device: str | None, force: bool, host: bool) -> str:
    """The machine's rates as a table, measured unless they are known, and where they are kept."""
    from oomc.calibrate import calibrate, calibrate_host, describe

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine, path = calibrate_host(device) if host else calibrate(device, force=force)
    return (
        f"{describe(machine)}\n\nkept in {path}; `oomc calibrate --force` measures anew, with `--host` the host alone"
    )


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def train(args: argparse.Namespace) -> None:
    """Load, compile, resume, train, save, report."""
    check_paths(args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(args.model, device, args.dtype, args.seed)
    tokens = load_tokens(args.data, tokenizer)
    vocabulary = model.config.get_text_config().vocab_size
    if int(tokens.max()) >= vocabulary:
        raise ValueError(f"the tokenizer makes token {int(tokens.max())}, but the model has only {vocabulary}")
    batches = TokenBatches(tokens, args.batch, args.seq, args.seed)

    optimizer = make_optimizer(args, model)
    step = oomc.compile(
        model,
        budget=oomc.Budget(device=args.device_budget, host=args.host_budget),
        optimizer=optimizer,
        example=next(iter(batches)),
        max_grad_norm=args.clip,
        state=args.state,
        device=device,
        seed=args.seed,
    )
    if args.print_after:
        print(step.report(stage=args.print_after))
    done = 0
    if args.resume:
        done, seen = resume(args, step, batches)
        batches = replace(batches, start=seen)
    losses = run_steps(args, step, batches, done, tokenizer)

    if args.save:
        model.save_pretrained(args.save)
        save_tokenizer(tokenizer, args.save)
    report = step.report()
    if args.report:
        report.save(args.report)
    print(report)
    print(f"{len(losses)} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    for name, path in (("report", args.report), ("checkpoint", args.checkpoint), ("model", args.save)):
        if path:
            print(f"{name}: {path}")


def check_paths(args: argparse.Namespace) -> None:
    """Refuse what could not be read or written, before any work is done."""
    if args.save_every and not args.checkpoint:
        raise ValueError("--save-every needs --checkpoint DIR, where to save")
    if args.report:
        check_ending(args.report)
    if args.resume:
        locate(args.resume)
    if args.checkpoint:
        foreign_entries(Path(args.checkpoint))
        if args.save and Path(args.save).resolve() == Path(args.checkpoint).resolve():
            raise ValueError("--save and --checkpoint are one directory; a checkpoint is a model directory already")


def make_optimizer(args: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    """torch's optimizer with the defaults of the command line where no option is given."""
    if args.momentum is not None and args.optimizer != "sgd":
        raise ValueError("--momentum is an option of --optimizer sgd")
    kind, options = OPTIMIZERS[args.optimizer]
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **options | hyperparameters(args))
    return optimizer


def hyperparameters(args: argparse.Namespace) -> dict[str, float]:
    """Those that are given as options."""
    given = {name: getattr(args, name) for name in ("lr", "weight_decay", "momentum")}
    return {name: value for name, value in given.items() if value is not None}


def run_steps(
    args: argparse.Namespace, step: Any, batches: TokenBatches, done: int, tokenizer: Tokenizer
) -> list[float]:
    """Train until `args.steps` steps are done, with checkpoints on the way and at the end; the losses.

    The last step is recorded for the report, unless it is the first, which compiles.
    """
    stream, saved = iter(batches), False
    losses: list[float] = []
    with tqdm(range(done, args.steps), initial=done, total=args.steps, unit="step") as progress:
        for number in progress:
            last = number + 1 == args.steps
            if args.report and last and losses:
                step.record()
            losses.append(train_step(step, stream, args.accumulate))
            progress.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{step.metrics['tokens_per_s']:.0f}")
            if args.checkpoint and (last or (args.save_every and (number + 1) % args.save_every == 0)):
                position = position_of(batches) | {
                    "steps": number + 1,
                    "batches": batches.start + len(losses) * args.accumulate,
                }
                # the first is waited for, so that the tokenizer can be put beside it; later ones take it along
                step.save(args.checkpoint, position, asynchronous=saved and not last)
                if not saved:
                    save_tokenizer(tokenizer, args.checkpoint)
                saved = True
    return losses


def train_step(step: Any, stream: Iterator[dict[str, torch.Tensor]], accumulate: int) -> float:
    """One update from `accumulate` micro-batches, which are all of one size; their mean loss."""
    if accumulate == 1:
        return float(step(**next(stream)))
    losses = [step.forward_backward(**next(stream)) for _ in range(accumulate)]
    step.update()
    return float(torch.stack(losses).mean())


def position_of(batches: TokenBatches) -> dict[str, int]:
    """What the order of batches depends on."""
    return {
        "--batch": batches.batch,
        "--seq": batches.seq,
        "--seed": batches.seed,
        "--data": batches.fingerprint(),
    }


def resume(args: argparse.Namespace, step: Any, batches: TokenBatches) -> tuple[int, int]:
    """Load the checkpoint; how many steps and batches it has seen. Hyperparameters given as options stay as given."""
    extra = step.load(args.resume)
    if not isinstance(extra, dict) or not {"steps", "batches"} <= extra.keys():
        raise ValueError(f"{args.resume} was not saved by `oomc train`: it does not say which batches it has seen")
    for name, value in position_of(batches).items():
        if extra.get(name) != value:
            was = "other text, or another tokenizer" if name == "--data" else extra.get(name)
            raise ValueError(
                f"{args.resume} was trained with another {name} ({was}): the batches that it has seen are not those of "
                "this run. Give the same options, or start anew from it: oomc train " + args.resume
            )
    if extra["steps"] >= args.steps:
        raise ValueError(f"{args.resume} has {extra['steps']} steps behind it; --steps {args.steps} asks for no more")
    for group in step.optimizer.param_groups:
        group.update(hyperparameters(args))
    return extra["steps"], extra["batches"]


def save_tokenizer(tokenizer: Any, directory: str) -> None:
    """Put the tokenizer beside the model, unless it is bytes, which is what a model without one has."""
    if not isinstance(tokenizer, ByteTokenizer):
        tokenizer.save_pretrained(directory)


def load_model(name: str, device: str, dtype: str | None, seed: int) -> tuple[Any, Tokenizer]:
    """The model and its tokenizer, of a directory or a preset; bytes where there is no tokenizer.

    The model's weights take no memory yet: the step reads or draws them block by block.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError("`oomc train` needs transformers: pip install 'oomc[hf]'") from error

    path = Path(name)
    if path.is_dir():
        return oomc.load(path, dtype=dtype), load_tokenizer(path)
    if name not in PRESETS:
        raise ValueError(f"{name!r} is neither a model directory nor a preset ({', '.join(PRESETS)})")
    config = transformers.Qwen3MoeConfig(**PRESETS[name])
    preset_dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    return oomc.load(config, dtype=preset_dtype, seed=seed), ByteTokenizer()


def load_tokenizer(path: Path) -> Tokenizer:
    """The model directory's tokenizer if it has one, else bytes."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((path / name).exists() for name in names):
        return ByteTokenizer()
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return tokenizer


def report_of(args: argparse.Namespace) -> str:
    """A saved report as text, or where the files are that were asked for."""
    path, wanted = Path(args.path), {".html": args.html, ".trace.json": args.trace}
    if not any(wanted.values()):
        return read_report(path)
    if path.suffix != ".json":
        raise ValueError(f"{path}: a page or a trace is made of a report that was saved as .json")
    report = oomc.Report.load(path)
    check_endings(wanted)
    return "\n".join(str(report.save(target)) for target in wanted.values() if target)


def read_report(path: Path) -> str:
    """A saved report as text."""
    if path.suffix not in (".json", ".txt"):
        raise ValueError(f"{path}: only what was saved as .json or .txt is printed; open it in a browser")
    return str(oomc.Report.load(path)) if path.suffix == ".json" else path.read_text(encoding="utf-8").rstrip()
