"""The wheel holds the tree, and the mapped folders are only ever imported as part of the package."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import oomc

ROOT = Path(__file__).parent.parent
MAPPED = ("passes", "runtime", "models")
KERNELS = {"oomc.runtime.triton_kernels", "oomc.expert_kernels", "oomc.sum_kernels", "oomc.triton_attention"}
NEEDS_CUDA = set() if importlib.util.find_spec("triton") else KERNELS
"""triton comes with torch's CUDA builds only."""
MODULES = sorted({module.name for module in pkgutil.walk_packages(oomc.__path__, "oomc.")} - set(NEEDS_CUDA))


def test_symlinks_lead_to_the_folders() -> None:
    for name in MAPPED:
        link = ROOT / "oomc" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


def test_folders_are_flat() -> None:
    for folder in (ROOT / "oomc", *(ROOT / name for name in MAPPED)):
        inner = [path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
        assert [name for name in inner if name != "__pycache__"] == [], f"{folder.name}/ has folders"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="not a supported Python")
def test_wheel_matches_the_tree(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    # built from a copy of what it needs, so that no build/ is left in the tree and none there gets in
    source = tmp_path / "source"
    for name in ("oomc", *MAPPED):
        (source / name).mkdir(parents=True)
        for file in (ROOT / name).iterdir():
            if file.is_file():
                (source / name / file.name).write_bytes(file.read_bytes())
    for name in MAPPED:
        (source / "oomc" / name).symlink_to(f"../{name}")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "-w", tmp_path, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")

    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"oomc/{file.name}" for file in (ROOT / "oomc").glob("*.py")} | {"oomc/py.typed"}
    for name in MAPPED:
        expected |= {f"oomc/{name}/{file.name}" for file in (ROOT / name).glob("*.py")}
    assert packed == expected


def test_mapped_folders_are_not_top_level_modules() -> None:
    code = f"import importlib, sys; [importlib.import_module(name) for name in {MODULES!r} if 'main' not in name]; "
    code += f"print([name for name in sys.modules if name.split('.')[0] in {MAPPED!r}])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert not {name.split(".")[0] for name in sys.modules} & set(MAPPED)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_are_true(name: str) -> None:
    if name.endswith("__main__"):
        pytest.skip("runs the command line")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0, f"{result.failed} of the examples in {name}'s docstrings failed (printed above)"


def test_constraints_name_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")}
    extras = [name for extra in project["optional-dependencies"].values() for name in extra]
    for requirement in [*project["dependencies"], *extras]:
        assert requirement.split(">")[0].lower() in pinned, f"constraints.txt has no tested version of {requirement}"
