# SPDX-License-Identifier: Apache-2.0
"""Settings and keys from files: defaults, and errors that name the fix."""

from pathlib import Path

import pytest

from hami_common.errors import SettingsInvalid
from hami_common.pods.signing import SignedPlacement, Signer
from hami_common.runtime.settings import load
from hami_scheduler.app import load_keys
from hami_scheduler.settings import Settings
from tests.unit.core.facts import signed


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_file_environment_and_flags_are_read_in_that_order(tmp_path: Path) -> None:
    config = write(
        tmp_path / "c.toml",
        'signing_key_file = "k"\nlease_s = 10.0\nretry_s = 1.0\n[policy]\nnode = "spread"\n',
    )
    found = load(
        Settings,
        service="scheduler",
        argv=["--config", str(config), "--set", "retry_s=3"],
        environ={"HAMI_SCHEDULER_LEASE_S": "20", "HAMI_SCHEDULER_RETRY_S": "2"},
    ).settings
    assert (found.lease_s, found.retry_s, found.policy.node) == (20.0, 3.0, "spread")


def test_key_is_required_and_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="signing_key_file"):
        load(Settings, service="scheduler", argv=[], environ={})
    config = write(tmp_path / "c.toml", 'signing_key_file = "k"\nlease = 3\n')
    with pytest.raises(SettingsInvalid, match="lease_s"):
        load(Settings, service="scheduler", argv=["--config", str(config)], environ={})


def test_timeouts_are_ordered() -> None:
    found = Settings(signing_key_file="k")
    assert found.sync_wait_s < 5.0, "kube-scheduler's extender timeout"
    assert found.bus_timeout_s < found.lease_s
    assert found.api_timeout_s < found.lease_s
    assert found.tick_s < found.heartbeat_timeout_s


def test_own_and_trusted_keys_verify_and_others_do_not(tmp_path: Path) -> None:
    own, old = Signer.generate(), Signer.generate()
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    settings = Settings(signing_key_file=str(tmp_path / "own.pem"), trusted_keys_dir=str(trusted))
    (tmp_path / "own.pem").write_bytes(own.private_pem())
    (trusted / "old.pub").write_bytes(old.public_pem())
    (trusted / "broken.pub").write_text("no key")
    keys = load_keys(settings)
    placement: SignedPlacement = signed("a1")
    for signer in (own, old):
        text = signer.sign(placement)
        assert keys.verifier.verify(text, pod_uid="u1", node="n1") == placement
    assert keys.signer.key_id == own.key_id


def test_key_file_that_is_missing_or_no_key_is_named(tmp_path: Path) -> None:
    missing = Settings(signing_key_file=str(tmp_path / "none.pem"))
    with pytest.raises(SettingsInvalid, match=r"signing_key_file.*No such file"):
        load_keys(missing)
    empty = Settings(signing_key_file=str(write(tmp_path / "empty.pem", "")))
    with pytest.raises(SettingsInvalid, match="Ed25519"):
        load_keys(empty)
