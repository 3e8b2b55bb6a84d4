"""If the simulator cannot be built, the skip names the missing tool."""

from __future__ import annotations

import pytest

from tests import devices


@pytest.fixture
def unbuilt(monkeypatch, tmp_path):
    """The module that builds the extension, on a machine where it has not been built."""
    monkeypatch.syspath_prepend(str(devices.SIM))
    from torch_sim import extension

    monkeypatch.setattr(extension, "KEPT", tmp_path)
    return extension


def test_a_missing_compiler_is_named(unbuilt, monkeypatch):
    monkeypatch.setattr(unbuilt, "COMPILERS", ("no-such-compiler",))
    assert "found none of no-such-compiler: install g++" in unbuilt.why_not()
    with pytest.raises(unbuilt.NotBuiltError, match="needs a C\\+\\+ compiler"):
        unbuilt.build()
    before = list(devices.sys.path)
    reason = devices.load_sim()
    assert reason == unbuilt.why_not()
    assert devices.sys.path == before


def test_what_the_compiler_refuses_is_shown(unbuilt, monkeypatch, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "sim.cpp").write_text("this is no C++;")
    monkeypatch.setattr(unbuilt, "SOURCE", source)
    if unbuilt.why_not():
        pytest.skip(unbuilt.why_not())
    with pytest.raises(unbuilt.NotBuiltError, match=r"does not compile .*sim\.cpp:\n"):
        unbuilt.build()
    assert not unbuilt.built().exists()
