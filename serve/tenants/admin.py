"""Who administers a server: a name for what is recorded, and a role. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["viewer", "reviewer", "publisher"]

ROLES: tuple[Role, ...] = ("viewer", "reviewer", "publisher")  # each may what those before it may


@dataclass(frozen=True)
class Admin:
    """The owner of an admin key, who checks nothing. A viewer reads what operators look at; a
    reviewer also labels what was checked; a publisher also decides which versions are served.
    """

    name: str
    role: Role = "viewer"

    def may_act_as(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)
