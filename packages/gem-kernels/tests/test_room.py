"""Places of device memory that tests beside one another share: files that any user may lock and none must own."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def places(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gem_kernels_conftest", Path(__file__).with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u"))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    return module._enter


def leave(held):
    for place in held:
        place.close()


def test_places_are_held_until_they_are_left(places):
    """Of 100 GiB, 80 are shared in four places."""
    first = places(3, 100.0)
    assert len(first) == 3
    assert places(2, 100.0) == []
    second = places(1, 100.0)
    assert len(second) == 1
    leave(first)
    third = places(3, 100.0)
    assert len(third) == 3
    leave(second + third)


def test_another_user_may_lock_what_this_one_made(places, tmp_path):
    before = os.umask(0o077)
    try:
        leave(places(4, 100.0))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o444 for path in tmp_path.iterdir()} == {0o444}
    for path in tmp_path.iterdir():
        path.chmod(0o444)  # as another user sees them: to be read, not written
    held = places(4, 100.0)
    assert len(held) == 4
    assert all(not place.writable() for place in held)
    leave(held)


def test_a_place_that_cannot_be_opened_is_passed_over(places, tmp_path):
    (tmp_path / "gem-gpu-memory-u-1").symlink_to(tmp_path / "nowhere" / "file")
    held = places(3, 100.0)
    assert len(held) == 3
    leave(held)
    assert places(4, 100.0) == []
