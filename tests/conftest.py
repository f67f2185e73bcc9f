"""What all tests share: golden texts, and leaving out what needs a GPU where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oomc.passes import choose_residency

GOLDEN = Path(__file__).parent / "golden"

Golden = Callable[[str, str], None]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one process a core: threads of torch's own would only wait for each other
        torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/*.txt anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture
def cut_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups run in chunks as small as those of all else, as they do where there are many more tokens."""
    monkeypatch.setattr(choose_residency, "LOOKUP_TOKENS", 1)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """`golden(name, text)` compares `text` with tests/golden/NAME.txt, or writes it with --update-golden."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        text = text.rstrip() + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} does not exist yet: run pytest with --update-golden and read what it writes"
        assert text == path.read_text(encoding="utf-8"), f"differs from {path}: if that is right, --update-golden"

    return check
