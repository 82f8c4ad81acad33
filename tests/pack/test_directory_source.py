"""The walk over a tree: one order, nothing followed out of it, nothing left out without a count."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stager.errors import UsageError
from stager.formats.samples import split_name
from stager.pack.findings import Findings, Kind, Policies
from stager.pack.samples import group_files, unkeyable
from stager.pack.sources.directory import walk_directory


def make_tree(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def walk(root: Path, policies: Policies = Policies()) -> tuple[list[str], Findings]:
    findings = Findings(policies)
    return [file.name for file in walk_directory(str(root), findings)], findings


def test_files_come_sorted_by_bytes_before_folders(tmp_path: Path) -> None:
    """The order depends on names alone; what shares a stem is together."""
    make_tree(tmp_path, "b/2.txt", "b/10.txt", "a.txt", "a-b.txt", "a.json", "a/x.txt", "é.txt", "Z.txt")
    assert walk(tmp_path)[0] == [
        "Z.txt", "a-b.txt", "a.json", "a.txt", "é.txt", "a/x.txt", "b/10.txt", "b/2.txt",
    ]  # fmt: skip


def test_hidden_and_special_files_are_counted(tmp_path: Path) -> None:
    """Dot files, AppleDouble files, hidden folders and pipes are left out and told; a pipe is not read."""
    make_tree(tmp_path, "a.txt", ".DS_Store", "._a.txt", ".git/config.txt", "d/.jpg")
    os.mkfifo(tmp_path / "pipe.txt")
    names, findings = walk(tmp_path)
    assert names == ["a.txt"]
    assert findings.counts == {Kind.HIDDEN: 4, Kind.SPECIAL: 1}


def test_links_stay_inside(tmp_path: Path) -> None:
    """By default links to files of the same source are packed, and every other link is refused by name."""
    outside = tmp_path / "outside"
    root = tmp_path / "root"
    make_tree(outside, "secret.txt")
    make_tree(root, "a.txt", "d/b.txt")
    (root / "in.txt").symlink_to("a.txt")
    (root / "out.txt").symlink_to(outside / "secret.txt")
    (root / "gone.txt").symlink_to("nothing")
    (root / "loop").symlink_to(root)
    names, findings = walk(root)
    assert names == ["a.txt", "in.txt", "d/b.txt"]
    with pytest.raises(UsageError, match="out of the source") as caught:
        findings.raise_refused()
    assert findings.counts == {Kind.LINK: 3} and "--symlinks follow" in caught.value.hint


def test_followed_links_end(tmp_path: Path) -> None:
    """With `follow` linked folders are walked, and a loop is refused instead of walked for ever."""
    root = tmp_path / "root"
    make_tree(root, "d/b.txt")
    make_tree(tmp_path / "other", "c.txt")
    (root / "l").symlink_to(tmp_path / "other")
    (root / "d" / "up").symlink_to(root)
    names, findings = walk(root, Policies(symlinks="follow"))
    assert names == ["d/b.txt", "l/c.txt"]
    assert findings.counts == {Kind.LINK: 1}
    assert walk(root, Policies(symlinks="skip"))[1].counts == {Kind.LINK_SKIPPED: 2}


def test_names_that_are_not_utf8_are_shown_escaped(tmp_path: Path) -> None:
    """A name from another encoding is refused, and its message can be printed anywhere."""
    (tmp_path / "a.txt").write_bytes(b"")
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "wb"):
        pass
    names, findings = walk(tmp_path)
    assert names == ["a.txt"]
    with pytest.raises(UsageError) as caught:
        findings.raise_refused()
    assert r"caf\xe9.txt" in str(caught.value)
    str(caught.value).encode()


def test_patterns_choose_files_and_folders(tmp_path: Path) -> None:
    """Include is for files, exclude for folders as well."""
    make_tree(tmp_path, "a.txt", "b.jpg", "tmp/c.txt", "d/e.txt")
    names, findings = walk(tmp_path, Policies(include=("*.txt",), exclude=("tmp",)))
    assert names == ["a.txt", "d/e.txt"]
    assert findings.counts == {Kind.UNWANTED: 2}


def test_files_with_one_stem_make_a_sample(tmp_path: Path) -> None:
    """Fields are sorted and in lower case; the folder belongs to the key."""
    make_tree(tmp_path, "a/1.seg.png", "a/1.JPG", "a/1.json", "a/10.jpg", "b/1.jpg")
    findings = Findings()
    samples = list(group_files(walk_directory(str(tmp_path), findings), findings))
    assert [(sample.key, sample.fields) for sample in samples] == [
        ("a/1", ("jpg", "json", "seg.png")),
        ("a/10", ("jpg",)),
        ("b/1", ("jpg",)),
    ]
    assert [file.name for file in samples[0].files] == ["a/1.JPG", "a/1.json", "a/1.seg.png"]
    assert not findings.counts


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Makefile", "no dot"),
        ("d.x/LICENSE", "no dot"),
        ("a.", "field would be ``"),
        ("a..jpg", "field would be `.jpg`"),
        ("a.__key__", "reserved"),
        ("__phello__/spam.py", "metadata"),
        ("a\n.txt", "control character"),
        ("x" * 1030 + ".txt", "longer than"),
        ("pkg/__init__.py", ""),
        ("__init__.py", ""),
        ("a.tar.gz", ""),
    ],
)
def test_names_that_make_no_sample(name: str, reason: str) -> None:
    """What readers would skip or mix up is told from what they read."""
    found = unkeyable(name, split_name(name))
    assert reason in found if reason else not found


def test_case_clashes_are_refused_and_dotted_stems_told(tmp_path: Path) -> None:
    """`a.jpg` and `a.JPG` are one field; `1.5 v2.png` becomes a field nobody meant."""
    make_tree(tmp_path, "a.JPG", "a.jpg", "photo 1.5 v2.png")
    findings = Findings()
    samples = list(group_files(walk_directory(str(tmp_path), findings), findings))
    assert [sample.key for sample in samples] == ["a", "photo 1"]
    assert findings.counts == {Kind.DOUBLE: 1, Kind.DOTTED: 1}
    with pytest.raises(UsageError, match=r"a\.JPG.*is `jpg` of `a` as well"):
        findings.raise_refused()


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything, so the refusal comes from a folder that vanishes under the walk."""
    make_tree(tmp_path, "a/1.txt", "b/1.txt")
    findings = Findings()
    names = []
    for file in walk_directory(str(tmp_path), findings):
        names.append(file.name)
        if file.name == "a/1.txt":
            (tmp_path / "b" / "1.txt").unlink()
            (tmp_path / "b").rmdir()
    assert names == ["a/1.txt"]
    with pytest.raises(UsageError, match=r"/b`: No such file"):
        findings.raise_refused()
