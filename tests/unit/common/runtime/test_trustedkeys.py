# SPDX-License-Identifier: Apache-2.0
"""Trusted keys are added and removed with their files."""

from pathlib import Path

from hami_common.errors import WireInvalid
from hami_common.model.placement import Placement
from hami_common.pods.signing import SignedPlacement, Signer
from hami_common.runtime.trustedkeys import TrustedKeys

SIGNER, OTHER = Signer.generate(), Signer.generate()


def trusts(keys: TrustedKeys, signer: Signer) -> bool:
    text = signer.sign(
        SignedPlacement(
            pod_uid="u",
            namespace="n",
            pod="p",
            allocation_id="a",
            ledger_seq=1,
            placement=Placement(node="n", containers=()),
        )
    )
    try:
        keys.verifier.verify(text, pod_uid="u")
    except WireInvalid:
        return False
    return True


def test_keys_are_read_again_when_a_file_changes(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    keys = TrustedKeys(directory)
    assert not trusts(keys, SIGNER)
    assert not keys.reload_if_changed()
    directory.mkdir()
    (directory / "a.pub").write_bytes(SIGNER.public_pem())
    assert keys.reload_if_changed()
    assert trusts(keys, SIGNER)
    (directory / "b.pub").write_bytes(OTHER.public_pem())
    assert keys.reload_if_changed()
    assert trusts(keys, OTHER)
    (directory / "a.pub").unlink()
    assert keys.reload_if_changed()
    assert not trusts(keys, SIGNER)


def test_file_that_is_no_key_does_not_take_the_good_ones_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.pub").write_bytes(SIGNER.public_pem())
    (tmp_path / "b.pub").write_bytes(b"not a key")
    (tmp_path / ".hidden").write_bytes(b"not a key either")
    assert trusts(TrustedKeys(tmp_path), SIGNER)
