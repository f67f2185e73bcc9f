"""Text and jsonl files become the right batches."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from oomc.data import ByteTokenizer, TokenBatches, find_files, load_tokens


def test_documents_of_all_kinds_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("two")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n' + json.dumps({"text": "é"}) + "\n")
    (tmp_path / "picture.png").write_bytes(b"\x00")
    assert [file.name for file in find_files([tmp_path])] == ["a.jsonl", "two.txt"]
    tokens = load_tokens([tmp_path], ByteTokenizer())
    assert bytes(tokens.tolist()) == b"x\0" + "é".encode() + b"\0two\0"
    assert bytes(load_tokens([tmp_path], ByteTokenizer(), limit=3).tolist()) == b"x\0\xc3"


def test_no_end_token_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    class Letters:
        eos_token_id = None

        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return [ord(letter) - ord("a") for letter in text]

    (tmp_path / "one.txt").write_text("abc")
    assert load_tokens([tmp_path / "one.txt"], Letters()).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "one.jsonl:1: not JSON"), ('{"body": "x"}', 'one.jsonl:1: expected an object with a "text" string')],
)
def test_bad_jsonl_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "one.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        load_tokens([tmp_path], ByteTokenizer())


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        find_files([tmp_path / "absent"])
    with pytest.raises(ValueError, match="no files to read"):
        find_files([tmp_path])


def test_each_epoch_has_every_window_once() -> None:
    tokens = torch.arange(50, dtype=torch.int32)
    batches = list(islice(TokenBatches(tokens, batch=2, seq=6, seed=3), 8))
    for epoch in (batches[:4], batches[4:]):
        seen = torch.cat([batch["input_ids"] for batch in epoch])
        assert sorted(seen[:, 0].tolist()) == [0, 6, 12, 18, 24, 30, 36, 42]
    first = batches[0]
    assert first["input_ids"].dtype == torch.int64
    assert torch.equal(first["input_ids"], first["labels"])
    again = next(iter(TokenBatches(tokens, batch=2, seq=6, seed=3)))
    assert torch.equal(first["input_ids"], again["input_ids"])
    other = next(iter(TokenBatches(tokens, batch=2, seq=6, seed=4)))
    assert not torch.equal(first["input_ids"], other["input_ids"])


@pytest.mark.parametrize("start", [0, 3, 4, 9])
def test_start_leaves_out_the_batches_before(start: int) -> None:
    tokens = torch.arange(50, dtype=torch.int32)  # 4 batches an epoch
    all_of_them = list(islice(TokenBatches(tokens, batch=2, seq=6, seed=3), 14))[start:]
    later = list(islice(TokenBatches(tokens, batch=2, seq=6, seed=3, start=start), 14 - start))
    for one, other in zip(all_of_them, later, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])


def test_other_text_has_another_fingerprint() -> None:
    tokens = torch.arange(50, dtype=torch.int32)
    assert TokenBatches(tokens, 2, 6).fingerprint() == TokenBatches(tokens.clone(), 1, 5).fingerprint()
    assert TokenBatches(tokens, 2, 6).fingerprint() != TokenBatches(tokens + 1, 2, 6).fingerprint()


def test_too_little_data() -> None:
    with pytest.raises(ValueError, match="fewer than one batch of 2 x 6"):
        TokenBatches(torch.arange(11), batch=2, seq=6)
