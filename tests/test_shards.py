"""Safetensors files read by header and by piece: what safetensors reads, and what is wrong with damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oomc import shards as module
from oomc.errors import CheckpointError, UnsupportedError
from oomc.shards import Shards

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
    torch.complex64,
]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {str(d): torch.randint(0, 2, (3, 5), generator=generator).to(d) for d in DTYPES}
    return {**made, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "long": torch.randn(1000)}


def save_sharded(directory: Path) -> None:
    """Two files and their index."""
    both = tensors()
    names = sorted(both)
    places = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(places.values()):
        save_file({n: both[n] for n in names if places[n] == file}, directory / file, metadata={"format": "pt"})
    (directory / module.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_reads_what_safetensors_reads(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    path = tmp_path / module.SINGLE
    save_file({k: v for k, v in tensors().items() if piece > 1 or k != "long"}, path)
    shards = Shards.of(tmp_path)
    for key, want in load_file(path).items():
        got = shards.read(key)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), key


def test_several_files_and_parts_of_a_larger_tensor(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    shards = Shards.of(tmp_path)
    want = tensors()
    assert shards.entries.keys() == want.keys()
    assert len({entry.path for entry in shards.entries.values()}) == 2
    out = torch.zeros(2, 3, 5)
    shards.read_into([("torch.float32", out[1])])
    assert torch.equal(out[1], want["torch.float32"])
    assert not out[0].any()


def test_only_headers_are_read_until_asked(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    shards = Shards.of(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert shards.entries["long"].nbytes == 4000
    with pytest.raises(FileNotFoundError):
        shards.read("long")


def damage(directory: Path, what: str) -> None:
    first, second = sorted(directory.glob("*.safetensors"))
    index = directory / module.INDEX
    raw = first.read_bytes()
    match what:
        case "cut":
            first.write_bytes(raw[:-1])
        case "cut in header":
            first.write_bytes(raw[:20])
        case "longer":
            first.write_bytes(raw + b"\0")
        case "empty":
            first.write_bytes(b"")
        case "no header":
            first.write_bytes(b"x" * 1000)
        case "no JSON":
            first.write_bytes(raw[:8] + b"?" + raw[9:])
        case "other bytes":
            first.write_bytes(raw.replace(b'"shape":[1000]', b'"shape":[1001]').replace(b"[3,5]", b"[3,6]"))
        case "no dtype":
            first.write_bytes(raw.replace(b'"dtype"', b'"Dtype"'))
        case "gone":
            first.unlink()
        case "swapped":
            save_file({"other": torch.zeros(2)}, second)
        case "twice":
            save_file({**load_file(second), **load_file(first)}, second)
        case "index":
            index.write_text('{"weight_map"')


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut", "cut short or damaged"), ("longer", "cut short or damaged"), ("cut in header", "within its header"),
        ("empty", "within its header"), ("no header", "within its header"), ("no JSON", "damaged header"),
        ("other bytes", "damaged header: .* of shape"), ("no dtype", "damaged header"), ("gone", "is missing"),
        ("swapped", "says that .* which it is not"), ("twice", "is in .* and in"), ("index", "index.json is damaged"),
    ],
)  # fmt: skip
def test_damage_is_named_before_anything_is_read(tmp_path: Path, what: str, message: str) -> None:
    save_sharded(tmp_path)
    Shards.of(tmp_path)
    damage(tmp_path, what)
    with pytest.raises(CheckpointError, match=message) as caught:
        Shards.of(tmp_path)
    assert str(tmp_path) in str(caught.value) or what == "twice"


def test_a_file_cut_while_it_is_used_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / module.SINGLE
    save_file({"a": torch.ones(100)}, path)
    shards = Shards.of(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="within a tensor"):
        shards.read("a")


def test_other_formats_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Shards.of(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin; oomc reads safetensors"):
        Shards.of(tmp_path)
    header = b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (tmp_path / module.SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(UnsupportedError, match="stored as F4"):
        Shards.of(tmp_path)
