"""The sentinel of arguments that were not given: what exists wins, else the host decides."""

from __future__ import annotations

import enum
from typing import Final


class Auto(enum.Enum):
    """An enum of one member, so that type checkers narrow `x is AUTO` and copies stay identical."""

    AUTO = "AUTO"

    def __repr__(self) -> str:
        return "AUTO"

    __str__ = __repr__


AUTO: Final = Auto.AUTO
