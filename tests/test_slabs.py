"""Host slabs: aliasing, exact masters, memory that is given back."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_model

from oomc.runtime import memory as memory_module
from oomc.runtime import slabs
from oomc.runtime.adamw import AdamW
from oomc.runtime.layout import ParamSpec, SlabLayout
from oomc.runtime.memory import HostMemory
from oomc.runtime.meter import host_bytes
from oomc.runtime.slabs import HostSlab
from tests.reference import round_bf16

SPECS = [
    ParamSpec("w", (33, 17), torch.bfloat16, True),
    ParamSpec("norm", (5,), torch.float32, True),
    ParamSpec("ids", (7,), torch.int32, False),
    ParamSpec("scalar", (), torch.bfloat16, True),
    ParamSpec("empty", (0, 3), torch.bfloat16, True),
]


def make() -> HostSlab:
    return HostSlab(SlabLayout.build("s", SPECS))


def test_parameters_alias_the_slab_with_storages_of_their_own() -> None:
    slab = make()
    params = {spec.name: slab.param(spec.name) for spec in SPECS}
    assert {n: (p.shape, p.dtype) for n, p in params.items()} == {s.name: (torch.Size(s.shape), s.dtype) for s in SPECS}
    params["w"].fill_(1.5)
    assert slab.param("w").eq(1.5).all()
    assert slab.layout.views(slab.weights)[0].eq(1.5).all()
    assert params["w"].untyped_storage().nbytes() == 33 * 17 * 2
    assert len({p.untyped_storage()._cdata for p in params.values()}) == len(params)


def test_safetensors_does_not_take_them_for_tied(tmp_path: Path) -> None:
    slab = make()
    model = torch.nn.Module()
    for name in ("w", "norm", "scalar"):
        slab.load(name, torch.randn(slab.layout.place(name).spec.shape))
        model.register_parameter(name, torch.nn.Parameter(slab.param(name)))
    save_model(model, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert set(saved) == {"w", "norm", "scalar"}
    assert torch.equal(saved["w"], slab.param("w"))
    assert torch.equal(copy.deepcopy(model).get_parameter("w"), slab.param("w"))


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_loading_keeps_the_exact_master(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_PIECE", piece)
    slab = make()
    values = {spec.name: torch.randn(spec.shape) * 3 for spec in SPECS if spec.trainable}
    values["w"][0, 0] = 1 + 2.0**-8  # a tie: away from zero, where torch's own rounding goes to even
    for name, value in values.items():
        slab.load(name, value)
        assert torch.equal(slab.master(name), value)
    assert torch.equal(slab.param("w"), round_bf16(values["w"]))
    assert slab.param("w")[0, 0] == 1 + 2.0**-7
    slab.load("w", values["w"].bfloat16())
    assert torch.equal(slab.master("w"), values["w"].bfloat16().float())
    slab.load("w", values["w"].t().contiguous().t())
    assert torch.equal(slab.master("w"), values["w"])
    slab.load("ids", torch.arange(7))
    assert slab.param("ids").tolist() == list(range(7))
    with pytest.raises(ValueError, match=r"\(33, 17\)"):
        slab.load("w", torch.zeros(17, 33))


def test_state_is_there_when_asked_for_and_starts_at_zero() -> None:
    slab = make()
    assert slab.host_bytes == slab.layout.weight_bytes + slab.lo.nbytes
    slab.add_state(AdamW().arrays)
    slab.add_state(AdamW().arrays[:1])
    whole = slab.layout.weight_bytes + slab.layout.state_bytes(AdamW().arrays)
    assert slab.host_bytes == whole
    assert not slab.state["m"].any()
    kept = slab.keep_gradients(wide=True)
    assert slab.host_bytes == whole + slab.layout.gradient_bytes(wide=True)
    assert slab.keep_gradients(wide=False) is kept, "wide memory serves both"


def test_memory_is_page_aligned_and_exact() -> None:
    memory = HostMemory(10_000_001)
    tensor = memory.tensor(torch.uint8, (10_000_001,))
    assert tensor.data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0
    assert not tensor.any()
    assert HostMemory(0).tensor(torch.float32, (0,)).numel() == 0


def test_closing_gives_memory_back_but_not_under_a_parameter() -> None:
    size = 32 << 20
    slab = HostSlab(SlabLayout.build("s", [ParamSpec("w", (size // 2,), torch.bfloat16, True)]))
    slab.add_state(AdamW().arrays)
    for tensor in (slab.weights, slab.state["m"], slab.state["v"]):
        tensor.fill_(1)
    parameter = slab.param("w")
    before = host_bytes()
    del tensor
    slab.close()
    gc.collect()
    assert before - host_bytes() > 3.9 * size, "the state is gone"
    assert parameter.view(torch.uint8).eq(1).all(), "the weights are not"
    before = host_bytes()
    del parameter
    assert before - host_bytes() > 0.9 * size


def test_a_refusal_to_pin_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refuses)
    monkeypatch.setattr(memory_module, "_clear_last_error", lambda: None)
    monkeypatch.setattr(memory_module, "_pin_warning", type(memory_module._pin_warning)())
    with pytest.warns(UserWarning, match="refused to register"):
        memory = HostMemory(4096, pin=True)
    assert not memory.pinned
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostMemory(4096, pin=True)
        HostMemory(0, pin=True)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_registered_memory_is_pinned_until_closed() -> None:
    memory = HostMemory(1 << 20, pin=True)
    tensor = memory.tensor(torch.uint8, (1 << 20,))
    assert memory.pinned
    assert tensor.is_pinned()
    assert tensor.to("cuda", non_blocking=True).sum() == 0
    memory.close()
    assert not memory.tensor(torch.uint8, (0,)).is_pinned()
    again = HostMemory(1 << 20, pin=True)
    address = again.tensor(torch.uint8, (1 << 20,)).data_ptr()
    memory_module._pin_warning.clear()
    with pytest.warns(UserWarning, match="refused"):
        registered = memory_module._register(address, 1 << 20)
    assert not registered, "it was registered already"
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
