# SPDX-License-Identifier: Apache-2.0
"""Laws of names on the bus: round trip, one token, no two names alike."""

from hypothesis import given
from hypothesis import strategies as st

from hami_common.bus import subjects
from tests.support.memorybus import matches

LABEL = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=1, max_size=5).map(".".join)


@given(NAME)
def test_unescape_undoes_escape(name: str) -> None:
    assert subjects.unescape(subjects.escape(name)) == name


@given(NAME)
def test_an_escaped_name_is_one_plain_token(name: str) -> None:
    token = subjects.escape(name)
    assert not set(token) & set(". *>\t\r\n%~$")


@given(NAME, NAME)
def test_different_names_have_different_tokens(one: str, other: str) -> None:
    assert (subjects.escape(one) == subjects.escape(other)) == (one == other)


@given(NAME, NAME)
def test_allocation_and_device_keys_parse_back(node: str, second: str) -> None:
    assert subjects.parse_allocation_key(subjects.allocation_key(node, second)) == (node, second)
    assert subjects.parse_devices_key(subjects.devices_key(node, second)) == (node, second)


@given(NAME, NAME, NAME)
def test_a_fence_covers_the_keys_of_its_node_and_no_others(node: str, other: str, uid: str) -> None:
    subject = subjects.kv_subject(subjects.ALLOC_BUCKET, subjects.allocation_key(other, uid))
    assert matches(subject, subjects.node_fence(node)) == (node == other)
