"""What numba keeps on disk is compiled anew when a file has changed whose constants are in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomc import jit

OWN = """
import sys
import constants
from constants import FACTOR

sys.path.append(JIT)  # by itself: the package takes seconds to import
from jit import jit

def scaled(x):
    return FACTOR * x

scaled = jit(scaled, constants.__file__)
print(scaled(3), sum(scaled.stats.cache_hits.values()))
"""


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_changed_constant_of_another_file_is_seen(tmp_path: Path, elsewhere: bool) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("JIT", repr(str(Path(jit.__file__).parent))))
    constants = tmp_path / "constants.py"

    def run(factor: int | None = None) -> list[str]:
        if factor is not None:
            constants.write_text(f"FACTOR = {factor}\n")
            # a bytecode file is told from its source by the date in whole seconds and the size
            later = constants.stat().st_mtime + factor
            os.utime(constants, (later, later))
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        made = subprocess.run(
            [sys.executable, "own.py"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
        return made.stdout.split()

    constants.write_text("FACTOR = 2\n")
    assert run() == ["6", "0"]
    assert run() == ["6", "1"]
    assert run(5) == ["15", "0"]
