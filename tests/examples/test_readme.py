"""The Python in README.md runs as it stands, and does what it says."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def python_blocks():
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.S | re.M)


def test_example_on_own_tensors():
    [code] = python_blocks()
    names = {}
    exec(compile(code, str(README), "exec"), names)
    for tensors in names["caches"].values():
        for tensor in tensors:
            blocks = tensor.numpy()
            assert blocks[[11, 4, 7]].tobytes() == blocks[[5, 9, 2]].tobytes()
            assert blocks[5].tobytes() != blocks[9].tobytes()
    assert names["pool"].pinned_bytes == 0


def test_pictures_are_there():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", README.read_text())
    assert pictures
    for picture in pictures:
        assert (README.parent / picture).read_bytes().startswith(b"\x89PNG"), picture


def test_no_line_of_code_is_cut_off():
    """On the pages of the site a line of code has room for 88 letters."""
    pages = [
        README,
        *(README.parent / "docs" / name for name in ("index.md", "install.md", "concepts.md", "commands.md")),
    ]
    for page in pages:
        for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.S | re.M):
            assert max(map(len, block.splitlines())) <= 88, page
