"""All operators of the `oomc` namespace, and what passes must know of them and of their like in ATen."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from oomc.attention import attention, attention_backward, attention_backward_in_place
from oomc.causal_conv import causal_conv1d, causal_conv1d_backward
from oomc.delta_rule import gated_delta_rule, gated_delta_rule_backward
from oomc.dropout import dropout
from oomc.experts import (
    combine,
    combine_backward,
    dispatch,
    dispatch_backward,
    grouped_bias,
    grouped_mm,
    grouped_mm_weight,
    grouped_sum,
    route,
)
from oomc.opdef import BODIES, NAMESPACE, Body
from oomc.rms_norm import rms_norm, rms_norm_backward

__all__ = [
    "BODIES",
    "CARRIES",
    "FENCES",
    "MIXERS",
    "NEVER_RECOMPUTE",
    "Body",
    "attention",
    "attention_backward",
    "attention_backward_in_place",
    "causal_conv1d",
    "causal_conv1d_backward",
    "combine",
    "combine_backward",
    "dispatch",
    "dispatch_backward",
    "dropout",
    "gated_delta_rule",
    "gated_delta_rule_backward",
    "grouped_bias",
    "grouped_mm",
    "grouped_mm_weight",
    "grouped_sum",
    "is_oomc",
    "rms_norm",
    "rms_norm_backward",
    "route",
]

MIXERS: frozenset[OpOverload] = frozenset({attention, causal_conv1d, gated_delta_rule})
FENCES: frozenset[OpOverload] = MIXERS | {
    attention_backward, attention_backward_in_place, causal_conv1d_backward, gated_delta_rule_backward,
}  # fmt: skip
"""Operators that mix the tokens of a sequence. Batch rows stay independent."""
CARRIES: dict[OpOverload, tuple[int, int]] = {causal_conv1d: (3, 1), gated_delta_rule: (5, 2)}
"""Operators whose positions need no more of those before them than a small state: which argument is the state before
the first position, and which result the one after the last. So they may run in parts of a sequence, in order."""


def _overloads(*names: str) -> set[OpOverload]:
    """Every overload of the ATen operators of these names."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    return {getattr(packet, overload) for packet in packets for overload in packet.overloads()}


NEVER_RECOMPUTE: frozenset[OpOverload] = frozenset(
    _overloads("topk", "sort", "argsort", "kthvalue", "argmax", "argmin", "median", "mode", "msort")
)
"""Operators whose result may jump on the slightest change of their input: the backward must see the same one.

`route` is a stable sort of integers: computed again from the same choice of experts, which is saved, it is the same.
"""


def is_oomc(op: Any) -> bool:
    """Whether a node's target is an operator of ours."""
    return isinstance(op, OpOverload) and op.namespace == NAMESPACE
