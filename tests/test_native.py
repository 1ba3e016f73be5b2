"""The one loader of native libraries: what cannot be loaded is a typed error or one warning, and the reason is kept."""

from __future__ import annotations

import warnings

import pytest

import vsa_inductor as vsa
from vsa_inductor import native
from vsa_inductor.backends import capability


@pytest.fixture(autouse=True)
def no_library_yet(monkeypatch):
    """As in an installation without one, whatever this one has."""
    monkeypatch.setattr(
        native, "_status", native.NativeStatus(None, False, "this installation was built without a native library")
    )


@pytest.fixture
def garbage(tmp_path):
    path = tmp_path / "_native_sm90.so"
    path.write_bytes(b"\x7fELF this is not a library")
    return path


def test_without_a_library_the_report_says_so():
    assert not native.status().loaded
    assert "without a native library" in str(vsa.backend_report())


def test_why_there_is_none_is_what_the_build_wrote(tmp_path):
    (tmp_path / native.REASON_FILE).write_text("nvcc was not found\n")
    vsa.load_packaged(tmp_path)
    sentence = "this installation was built without a native library: nvcc was not found"
    assert native.status() == native.NativeStatus(None, False, sentence)
    assert sentence in str(vsa.backend_report())


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "absent.so"
    with pytest.raises(vsa.NativeLibraryError) as caught:
        vsa.load_library(path)
    assert str(path) in str(caught.value) and "not a file" in str(caught.value)
    with pytest.raises(vsa.NativeLibraryError, match="not a file"):
        vsa.load_library(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\x7fELF this is not a library"], ids=["empty", "garbage"])
def test_a_broken_file_is_named_with_the_reason_of_the_loader(garbage, content):
    garbage.write_bytes(content)
    before = native.status()
    with pytest.raises(vsa.NativeLibraryError) as caught:
        vsa.load_library(garbage)
    assert str(garbage) in str(caught.value)
    reason = caught.value
    while reason.__cause__ is not None:
        reason = reason.__cause__
    # torch wraps what dlopen said, such as "invalid ELF header" or an undefined symbol.
    assert isinstance(reason, OSError) and str(reason) in str(caught.value)
    assert native.status() is before, "what was loaded before stays in use"


def test_a_broken_packaged_library_warns_once_and_everything_else_works(garbage):
    with pytest.warns(UserWarning, match="works without its native library") as seen:
        vsa.load_packaged(garbage.parent)
    assert len(seen) == 1 and str(garbage) in str(seen[0].message)
    status = native.status()
    assert (status.path, status.loaded) == (str(garbage), False)
    assert str(garbage) in status.reason
    report = vsa.backend_report()
    assert report.native is status and status.reason in str(report)
    assert vsa.TileLayout.from_video_shape(1, 1, 1).num_blocks == 1


def test_an_empty_folder_is_no_news(tmp_path):
    before = native.status()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vsa.load_packaged(tmp_path)
    assert native.status() is before


def test_a_library_that_loads_is_reported(monkeypatch, garbage):
    loaded, forgotten = [], []
    monkeypatch.setattr(native.torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(capability, "library_changed", lambda: forgotten.append(len(loaded)))
    vsa.load_library(garbage)
    assert loaded == [str(garbage.resolve())]
    assert forgotten == [1], "what was chosen without it is chosen again"
    assert native.status() == native.NativeStatus(str(garbage), True, f"loaded from {garbage}")
    assert f"loaded from {garbage}" in str(vsa.backend_report())


def test_a_library_of_ours_says_what_it_was_built_for(monkeypatch, garbage):
    monkeypatch.setattr(native.torch.ops, "load_library", lambda path: None)
    mark = f"vsa_native interface={native.INTERFACE} architectures=90a,100a cuda=13.0.88 sources=1a2b3c4d"
    garbage.write_bytes(b"\x7fELF\0" + mark.encode() + b"\0")
    vsa.load_library(garbage)
    assert native.status().reason == f"loaded from {garbage} (sm_90a, sm_100a; CUDA 13.0.88; sources 1a2b3c4d)"


def test_a_library_for_another_interface_is_not_loaded(monkeypatch, garbage):
    loaded = []
    monkeypatch.setattr(native.torch.ops, "load_library", loaded.append)
    garbage.write_bytes(b"\x7fELF\0vsa_native interface=99 architectures=90a cuda=13.0.88 sources=1a2b3c4d\0")
    with pytest.raises(vsa.NativeLibraryError, match=f"interface 99; allowed: interface {native.INTERFACE}"):
        vsa.load_library(garbage)
    with pytest.warns(UserWarning, match="interface 99"):
        vsa.load_packaged(garbage.parent)
    assert not loaded and not native.status().loaded


def test_the_error_is_a_runtime_error():
    assert issubclass(vsa.NativeLibraryError, RuntimeError) and not issubclass(vsa.NativeLibraryError, ImportError)
