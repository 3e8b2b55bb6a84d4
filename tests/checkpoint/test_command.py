"""The command `accordion checkpoint`, and export to other formats."""

import io
import json
import os
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accordion import cli
from accordion.checkpoint import save
from accordion.checkpoint.convert import export
from accordion.errors import CheckpointError, UsageError
from accordion.weights.lazy_tensors import rows_of_folder
from tests.checkpoint.test_one_process import Tied, trained
from tests.support.checkpoints import small


def answer_of(capsys, *words):
    code = cli.main(["checkpoint", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_inspect_and_verify(tmp_path, capsys):
    model = Tied()
    optimizer = trained(model)
    save(tmp_path / "step-1", model, optimizer, extra={"step": 1})
    with torch.no_grad():
        model.scale += 1
    save(tmp_path / "step-2", model, optimizer, extra={"step": 2})
    code, answer = answer_of(capsys, "inspect", tmp_path / "step-1")
    assert (code, answer["extra"], answer["saved_by"]["num_ranks"]) == (0, {"step": 1}, 1)
    assert answer["tensors"]["model/embed.weight"]["shape"] == [5, 3]
    assert answer["aliases"] == {"model/head.weight": "model/embed.weight"}
    assert cli.main(["checkpoint", "inspect", str(tmp_path / "step-1")]) == 0
    assert "model/embed.weight  F32 [5, 3]  1 chunks" in capsys.readouterr().out

    assert answer_of(capsys, "verify", tmp_path / "step-2") == (
        0,
        {"path": str(tmp_path / "step-2"), "good": True, "faults": []},
    )
    file = tmp_path / "step-2" / "rank-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-200] + bytes([whole[-200] ^ 4]) + whole[-199:])
    code, answer = answer_of(capsys, "verify", tmp_path / "step-2")
    assert code == 1
    assert len(answer["faults"]) == 1
    assert "is damaged in bytes" in answer["faults"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verifi", "x"], "invalid choice"),
        (["export", "x", "y", "--format", "tar"], "invalid choice"),
        (["export", "x", "y", "--dtype", "I8"], "no floating-point dtype"),
    ],
)
def test_bad_arguments_give_an_error_of_one_line(words, message, capsys):
    assert cli.main(["checkpoint", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_missing_checkpoint_gives_an_error_of_one_line(tmp_path, capsys):
    assert cli.main(["checkpoint", "inspect", str(tmp_path)]) == 1
    assert "is no checkpoint" in capsys.readouterr().err
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert cli.main(["checkpoint", "--help"]) == 0


NO_CONFIG = "config.json: the checkpoint does not say of which model it is; give --like a folder that has it"


def test_export_writes_one_file_or_several_with_an_index(tmp_path, monkeypatch, capsys):
    model = small(1)
    state = model.state_dict()
    save(tmp_path / "c", model)
    assert cli.main(["checkpoint", "export", str(tmp_path / "c"), str(tmp_path / "hf"), "--dtype", "BF16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"written: {tmp_path / 'hf' / 'model.safetensors'}", f"left out: {NO_CONFIG}"]
    assert load_file(tmp_path / "hf" / "model.safetensors")["0.weight"].dtype == torch.bfloat16
    export(tmp_path / "c", tmp_path / "one.safetensors", "safetensors")
    one = load_file(tmp_path / "one.safetensors")
    assert {name: tensor.tolist() for name, tensor in one.items()} == {n: t.tolist() for n, t in state.items()}
    monkeypatch.setattr("accordion.checkpoint.convert.SHARD_BYTES", 40)
    assert len(export(tmp_path / "c", tmp_path / "many", dtype=torch.bfloat16)) == 3
    many = {name: rows.whole() for name, rows in rows_of_folder(tmp_path / "many").items()}
    assert all(torch.equal(many[name], tensor.bfloat16()) for name, tensor in state.items())
    with pytest.raises(UsageError, match="exists"):
        export(tmp_path / "c", tmp_path / "many")


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    save(tmp_path / "c", Tied())
    with open(tmp_path / "c" / "rank-00000.safetensors", "r+b") as file:
        file.seek(-150, os.SEEK_END)
        file.write(b"\xff\x00\xff")
    with pytest.raises(CheckpointError, match="is damaged"):
        export(tmp_path / "c", tmp_path / "bad")
    assert os.listdir(tmp_path) == ["c"]


def test_characters_that_the_terminal_lacks_are_escaped(tmp_path, monkeypatch):
    model = nn.Module()
    model.register_buffer("gewürz", torch.ones(2))
    save(tmp_path / "gewürz", model)
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["checkpoint", "inspect", str(tmp_path / "gewürz")]) == 0
    assert b"model/gew\\xfcrz  F32 [2]" in terminal.buffer.getvalue()
