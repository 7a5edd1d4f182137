"""What the API pages of the site change in docstrings. mkdocs.yml names it as an extension of griffe.

"Example:" is the heading of a section of code, and :meth:`~a.b` of Sphinx becomes `b`.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:meth|class|func|attr|mod|data):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = ROLE.sub(lambda role: f"`{role[1].removeprefix('paddle_kv.')}`", text)
