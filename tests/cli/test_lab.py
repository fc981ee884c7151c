import importlib.util
import subprocess
import sys

import pytest

from kvdrift.cli import lab, main


@pytest.fixture
def started(monkeypatch):
    """The commands that would have been started."""
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(lab.subprocess, "run", run)
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000, raising=False)
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: object())
    return commands


def test_opens_a_folder_of_notebooks(tmp_path, started):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "a.ipynb").write_text("{}")
    assert main(["lab", str(tmp_path), "--no-browser", "--port", "9999"]) == 0
    root = f"--ServerApp.root_dir={tmp_path.resolve()}"
    assert started == [[sys.executable, "-m", "jupyterlab", root, "--no-browser", "--port=9999"]]


def test_this_folder_comes_before_the_checkout(tmp_path, started, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tutorials").mkdir()
    (tmp_path / "tutorials" / "01.ipynb").write_text("{}")
    assert lab.find(None) == tmp_path


@pytest.mark.parametrize("exists", [False, True])
def test_no_notebooks_is_a_sentence(tmp_path, started, capsys, exists):
    folder = tmp_path / "none"
    if exists:
        folder.mkdir()
    assert main(["lab", str(folder)]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert ("There are no notebooks in" if exists else "is no folder") in said
    assert started == []


def test_without_notebooks_anywhere_the_clone_is_named(tmp_path, started, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "FOLDERS", ("nothing-is-called-so",))
    assert main(["lab"]) == 1
    assert "clone of the repository" in " ".join(capsys.readouterr().err.split())


def test_missing_jupyterlab_names_the_extra(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.ipynb").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["lab", str(tmp_path)]) == 1
    assert "pip install 'kvdrift[notebook]'" in " ".join(capsys.readouterr().err.split())


def test_exit_code_is_jupyterlabs(tmp_path, started, monkeypatch):
    (tmp_path / "a.ipynb").write_text("{}")
    monkeypatch.setattr(lab.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 3))
    assert main(["lab", str(tmp_path)]) == 3


def test_root_is_allowed_as_in_a_container(tmp_path, started, monkeypatch):
    (tmp_path / "a.ipynb").write_text("{}")
    monkeypatch.setattr(lab.os, "geteuid", lambda: 0, raising=False)
    assert main(["lab", str(tmp_path)]) == 0
    assert "--allow-root" in started[0]
