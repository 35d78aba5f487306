"""Text with names in braces, such as what a judge is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"\{(\w+)\}")


def fill(template: str, values: Mapping[str, Any]) -> str:
    """Put values in the place of their names in braces; braces around anything else stay, as in ``{"grade": 1}``."""
    return _NAME.sub(lambda match: str(values[match[1]]) if match[1] in values else match[0], template)


def names_in(template: str) -> list[str]:
    """Names in braces, in order."""
    return _NAME.findall(template)
