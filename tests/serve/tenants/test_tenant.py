"""A tenant's salt for the cache: nobody else's, whatever either of them sends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.tenants.tenant import Tenant

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True)
SALTS = st.one_of(st.none(), st.text(max_size=12))


@given(NAMES, NAMES, SALTS, SALTS, st.booleans())
def test_no_two_tenants_have_the_same_salt_unless_both_share_their_cache(
    first: str, second: str, salt: str | None, other_salt: str | None, shares: bool
) -> None:
    own = Tenant(first, ()).salted(salt)
    assert own is not None
    if first != second:
        assert own != Tenant(second, ()).salted(other_salt)
    assert own != Tenant(second, (), shares_cache=True).salted(other_salt)


def test_a_tenant_s_own_salts_part_its_conversations_too() -> None:
    for shares in (False, True):
        tenant = Tenant("shop", (), shares_cache=shares)
        assert len({tenant.salted(salt) for salt in (None, "a", "b")}) == 3


def test_those_who_share_the_cache_share_it() -> None:
    first, second = (Tenant(name, (), shares_cache=True) for name in ("a", "b"))
    assert first.salted(None) is None and second.salted(None) is None
    assert first.salted("x") == second.salted("x")
