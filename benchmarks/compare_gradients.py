"""Compare gradients that benchmarks/fsdp2.py and benchmarks/oomc_step.py have saved.

    python benchmarks/compare_gradients.py ours4 fsdp4 --noise fsdp2layers_bf16 fsdp2layers_fp32

For each tensor: the norm of the difference over the norm of the second file's. With `--noise A B`, the same between A
and B (a run of fewer layers, in bf16 and in fp32) is the measure: the ratio of both, by the kind of tensor (its name
without the layer's number), largest first.
"""

from __future__ import annotations

import argparse
import json
import re

import torch
from safetensors import safe_open


def distances(first: str, second: str) -> dict[str, float]:
    """Relative distance of each tensor that both files hold, by name."""
    found = {}
    with safe_open(first, "pt") as a, safe_open(second, "pt") as b:
        for name in sorted(set(a.keys()) & set(b.keys())):
            x, y = a.get_tensor(name).float(), b.get_tensor(name).float()
            found[name] = float((x - y).norm() / y.norm())
    return found


def kind(name: str) -> str:
    """A tensor's name without the number of its layer."""
    return re.sub(r"\.\d+\.", ".N.", name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--noise", nargs=2, metavar=("BF16", "FP32"))
    args = parser.parse_args()
    torch.set_num_threads(max(1, torch.get_num_threads()))
    ours = distances(args.first, args.second)
    worst = max(ours, key=lambda n: ours[n])
    result: dict[str, object] = {"tensors": len(ours), "largest": ours[worst], "largest_of": worst}
    if args.noise:
        noise: dict[str, float] = {}
        for name, distance in distances(*args.noise).items():
            noise[kind(name)] = max(noise.get(kind(name), 0.0), distance)
        ratios = {n: d / noise[kind(n)] for n, d in ours.items() if kind(n) in noise}
        top = sorted(ratios, key=lambda n: -ratios[n])
        for name in top[:12]:
            print(f"{name:60} {ours[name]:.3e} noise {noise[kind(name)]:.3e} ratio {ratios[name]:.3f}")
        result |= {"compared": len(ratios), "largest_ratio": ratios[top[0]], "largest_ratio_of": top[0]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
