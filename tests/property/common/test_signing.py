# SPDX-License-Identifier: Apache-2.0
"""Law of the signed annotation: only the signed content verifies."""

from hypothesis import given
from hypothesis import strategies as st

from hami_common.errors import WireInvalid
from hami_common.model.placement import ContainerShares, Placement, Share
from hami_common.pods.signing import SignedPlacement, Signer, Verifier

SIGNER = Signer.generate()
VERIFIER = Verifier.from_pems([SIGNER.public_pem()])
TEXT = st.text(max_size=30)
SHARES = st.builds(
    Share,
    vendor=TEXT,
    uuid=TEXT,
    memory_mib=st.integers(0, 2**31 - 1),
    core_pct=st.integers(0, 100),
    exclusive=st.booleans(),
)
PLACEMENTS = st.builds(
    SignedPlacement,
    pod_uid=TEXT,
    namespace=TEXT,
    pod=TEXT,
    allocation_id=TEXT,
    ledger_seq=st.integers(0, 2**62),
    placement=st.builds(
        Placement,
        node=TEXT,
        containers=st.lists(
            st.builds(
                ContainerShares,
                name=TEXT,
                kind=st.sampled_from(["init", "sidecar", "app"]),
                shares=st.lists(SHARES, max_size=3).map(tuple),
                priority=st.none() | st.integers(0, 7),
            ),
            max_size=3,
        ).map(tuple),
    ),
)


@given(PLACEMENTS)
def test_any_placement_survives_signing(placement: SignedPlacement) -> None:
    assert VERIFIER.verify(SIGNER.sign(placement), pod_uid=placement.pod_uid) == placement


@given(PLACEMENTS, st.data())
def test_one_changed_character_never_verifies_as_something_else(
    placement: SignedPlacement, data: st.DataObject
) -> None:
    text = SIGNER.sign(placement)
    position = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.characters(codec="utf-8"))
    changed = text[:position] + character + text[position + 1 :]
    try:
        verified = VERIFIER.verify(changed, pod_uid=placement.pod_uid)
    except WireInvalid:
        return
    assert verified == placement


@given(st.text() | st.binary().map(lambda raw: raw.decode("latin-1")))
def test_foreign_text_is_wire_invalid_and_nothing_else(text: str) -> None:
    try:
        VERIFIER.verify(text, pod_uid="u")
    except WireInvalid:
        return
    raise AssertionError("foreign text verified")
