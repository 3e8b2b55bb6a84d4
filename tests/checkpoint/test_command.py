"""The command `accordion checkpoint`, and conversion from and to other formats."""

import io
import json
import os
import resource
import sys
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from accordion import cli
from accordion.checkpoint import load, save
from accordion.checkpoint.convert import FORMATS, convert, export
from accordion.errors import AccordionError, UsageError
from tests.checkpoint.test_one_process import Tied
from tests.support.checkpoints import assert_same_tensors, names, small, stepped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def answer_of(capsys, *words):
    code = cli.main(["checkpoint", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_inspect_and_verify(tmp_path, capsys):
    model = Tied()
    save(tmp_path / "step-1", model, stepped(model), extra={"step": 1})
    code, answer = answer_of(capsys, "inspect", tmp_path / "step-1")
    assert (code, answer["extra"], answer["saved_by"]["num_ranks"]) == (0, {"step": 1}, 1)
    assert answer["tensors"]["model/embed.weight"]["shape"] == [5, 3]
    assert answer["aliases"] == {"model/head.weight": "model/embed.weight"}
    assert cli.main(["checkpoint", "inspect", str(tmp_path / "step-1")]) == 0
    assert "model/embed.weight  F32 [5, 3]  1 chunks" in capsys.readouterr().out

    assert answer_of(capsys, "verify", tmp_path / "step-1") == (
        0,
        {"path": str(tmp_path / "step-1"), "good": True, "faults": []},
    )
    file = tmp_path / "step-1" / "rank-00000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-200] + bytes([whole[-200] ^ 4]) + whole[-199:])
    code, answer = answer_of(capsys, "verify", tmp_path / "step-1")
    assert code == 1
    assert len(answer["faults"]) == 1
    assert "is damaged in bytes" in answer["faults"][0]


def test_missing_checkpoint_gives_an_error_of_one_line(tmp_path, capsys):
    assert cli.main(["checkpoint", "inspect", str(tmp_path)]) == 1
    assert "is no checkpoint" in capsys.readouterr().err
    assert cli.main(["checkpoint", "verify", str(tmp_path / "nowhere")]) == 1
    assert "nowhere is no checkpoint: there is no such folder" in capsys.readouterr().err
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert cli.main(["checkpoint", "--help"]) == 0


NO_CONFIG = "config.json: the checkpoint does not say of which model it is; give --like a folder that has it"


def test_export_and_convert_print_json(tmp_path, capsys):
    model, other = small(1), small(2)
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "m.pt")
    code, answer = answer_of(capsys, "convert", tmp_path / "m.pt", tmp_path / "c")
    assert (code, answer["from"], answer["tensors"], answer["left_out"]) == (0, "torch.save", 4, ["epoch"])
    assert answer["path"] == str(tmp_path / "c")
    assert cli.main(["checkpoint", "export", str(tmp_path / "c"), str(tmp_path / "hf"), "--dtype", "BF16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"written: {tmp_path / 'hf' / 'model.safetensors'}", f"left out: {NO_CONFIG}"]
    assert load_file(tmp_path / "hf" / "model.safetensors")["0.weight"].dtype == torch.bfloat16
    load(tmp_path / "c", other)
    assert_same_tensors(model, other)
    for job, source, target in (("export", "c", "hf"), ("convert", "m.pt", "m.pt")):
        assert cli.main(["checkpoint", job, str(tmp_path / source), str(tmp_path / target)]) in (1, 2)
        assert "exists" in capsys.readouterr().err


def test_safetensors_are_exported_and_converted(tmp_path, monkeypatch):
    model, other = small(1), small(2)
    state = model.state_dict()
    (tmp_path / "hf").mkdir()
    parts = {"a.safetensors": ["0.weight", "1.bias"], "b.safetensors": ["0.bias", "1.weight"]}
    for name, keys in parts.items():
        save_file({key: state[key] for key in keys}, tmp_path / "hf" / name)
    where = {key: name for name, keys in parts.items() for key in keys}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    convert(tmp_path / "hf", tmp_path / "c")
    load(tmp_path / "c", other)
    assert_same_tensors(model, other)
    monkeypatch.setattr("accordion.checkpoint.convert.SHARD_BYTES", 40)
    assert len(export(tmp_path / "c", tmp_path / "many", dtype=torch.bfloat16)) == 3
    convert(tmp_path / "many", tmp_path / "again")
    load(tmp_path / "again", other)
    assert torch.equal(other[0].weight, model[0].weight.bfloat16().float())


def test_torch_and_dcp_are_exported(tmp_path):
    model = Tied()
    save(tmp_path / "c", model)
    export(tmp_path / "c", tmp_path / "m.pt", "torch")
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    assert_same_tensors(model, type("", (), {"state_dict": lambda self: state})())
    export(tmp_path / "c", tmp_path / "dcp", "dcp")
    other = Tied()
    into = {"model": other.state_dict()}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same_tensors(model, other)


@pytest.mark.parametrize("kind", FORMATS)
def test_export_that_fails_raises_oserror_and_leaves_no_folder(tmp_path, kind):
    save(tmp_path / "c", nn.Linear(200, 200))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, hard))  # in place of a full disk
    try:
        with pytest.raises(OSError, match=r"File too large|torch cannot write the files; the disk may be full"):
            export(tmp_path / "c", tmp_path / "new" / "deep" / "out", kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for path in ("x" * 250, f"{'x' * 300}/out"):
        with pytest.raises(UsageError, match="cannot be created: File name too long"):
            export(tmp_path / "c", tmp_path / "new" / path, kind)
    assert names(tmp_path) == ["c"]
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="link exists"):
        export(tmp_path / "c", tmp_path / "link", kind)
    assert names(tmp_path) == ["c", "link"]


def test_broken_sources_are_named_in_errors(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("x", "y")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").touch()
    for name, why in (
        ("absent", "is neither a folder of safetensors"),
        ("a.pt", "is damaged"),
        ("c", "is a folder of torch.distributed.checkpoint; read it .* with torch's `dcp.load` and `set_state_dict`"),
    ):
        with pytest.raises(AccordionError, match=why):
            convert(tmp_path / name, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "c"]


def test_characters_that_the_terminal_lacks_are_escaped(tmp_path, monkeypatch):
    model = nn.Module()
    model.register_buffer("gewürz", torch.ones(2))
    save(tmp_path / "gewürz", model)
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["checkpoint", "inspect", str(tmp_path / "gewürz")]) == 0
    assert b"model/gew\\xfcrz  F32 [2]" in terminal.buffer.getvalue()
