"""The command line: `oomc train` and `oomc report`, on the public API alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import oomc
from oomc.data import ByteTokenizer, TokenBatches, Tokenizer, load_tokens
from oomc.errors import OomcError

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 for a mistake that the message explains."""
    args = make_parser().parse_args(argv)
    try:
        if args.command == "train":
            train(args)
        else:
            print(read_report(Path(args.path)))
    except (OomcError, ValueError, OSError) as error:
        print(f"oomc: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


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
    one.add_argument("--steps", type=positive, default=100, help="training steps (default: %(default)s)")
    one.add_argument("--batch", type=positive, default=4, help="sequences a step (default: %(default)s)")
    one.add_argument("--seq", type=positive, default=512, help="tokens a sequence (default: %(default)s)")
    one.add_argument("--lr", type=float, default=1e-4, help="AdamW's learning rate (default: %(default)s)")
    one.add_argument("--weight-decay", type=float, default=0.01, help="AdamW's (default: %(default)s)")
    one.add_argument("--seed", type=int, default=0, help="of a preset's weights and the data's order")
    one.add_argument("--save", metavar="DIR", help="where to save the trained model")
    one.add_argument("--report", metavar="PATH", help="where to save the report (.txt or .json)")
    one.add_argument("--print-after", metavar="PASS", help="print the graph as it is after this pass")

    two = commands.add_parser("report", help="print a saved report")
    two.add_argument("path", help="a report saved as .json or .txt")
    return parser


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def train(args: argparse.Namespace) -> None:
    """Load, compile, train, report, save."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(args.model, device, args.dtype, args.seed)
    tokens = load_tokens(args.data, tokenizer)
    vocabulary = model.config.get_text_config().vocab_size
    if int(tokens.max()) >= vocabulary:
        raise ValueError(f"the tokenizer makes token {int(tokens.max())}, but the model has only {vocabulary}")
    batches = TokenBatches(tokens, args.batch, args.seq, args.seed)

    step = oomc.compile(
        model,
        budget=oomc.Budget(device=args.device_budget, host=args.host_budget),
        optimizer=torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay),
        example=next(iter(batches)),
        device=device,
    )
    if args.print_after:
        print(step.report(stage=args.print_after))
    losses = []
    with tqdm(islice(batches, args.steps), total=args.steps, unit="step") as progress:
        for batch in progress:
            losses.append(float(step(**batch)))
            progress.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{step.metrics['tokens_per_s']:.0f}")

    print(step.report())
    print(f"{args.steps} steps, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if args.report:
        step.report().save(args.report)
        print(f"report: {args.report}")
    if args.save:
        model.save_pretrained(args.save)
        if not isinstance(tokenizer, ByteTokenizer):
            tokenizer.save_pretrained(args.save)
        print(f"model: {args.save}")


def load_model(name: str, device: str, dtype: str | None, seed: int) -> tuple[Any, Any]:
    """The model and its tokenizer, from a directory or made from a preset; bytes where there is no tokenizer."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError("`oomc train` needs transformers: pip install 'oomc[hf]'") from error

    path = Path(name)
    if path.is_dir():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
        return model, load_tokenizer(path)
    if name not in PRESETS:
        raise ValueError(f"{name!r} is neither a model directory nor a preset ({', '.join(PRESETS)})")
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(**PRESETS[name])
    preset_dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, preset_dtype))
    return model, ByteTokenizer()


def load_tokenizer(path: Path) -> Tokenizer:
    """The model directory's tokenizer if it has one, else bytes."""
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((path / name).exists() for name in names):
        return ByteTokenizer()
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return tokenizer


def read_report(path: Path) -> str:
    """A saved report as text."""
    return str(oomc.Report.load(path)) if path.suffix == ".json" else path.read_text(encoding="utf-8").rstrip()
