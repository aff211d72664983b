# SPDX-License-Identifier: Apache-2.0
"""The table of bus permissions, against the subjects that are really used."""

import msgspec
import pytest

from hami_common.bus import grants, subjects
from hami_common.bus.nkeys import NKey
from hami_common.errors import WireInvalid

NODE, OTHER, UID = "gpu-1.zone.example", "gpu-2", "6f0c2b1e-0000-4d00-8000-000000000000"


def covers(pattern: str, subject: str) -> bool:
    """Match a subject with wildcards against one without, as NATS does."""
    wanted, given = pattern.split("."), subject.split(".")
    for place, token in enumerate(wanted):
        if token == ">":
            return len(given) > place
        if place >= len(given) or token not in ("*", given[place]):
            return False
    return len(wanted) == len(given)


def said_by_agent(node: str) -> list[str]:
    key = subjects.allocation_key(node, UID)
    return [
        subjects.report(node, "nvidia"),
        subjects.heartbeat(node),
        subjects.fault(node),
        subjects.breach_event(node, UID),
        subjects.breach_event(node, ""),
        subjects.partition_event(node, "nvidia"),
        subjects.usage_event(node),
        subjects.quarantine_event("nodeagent", node),
        subjects.kv_subject(subjects.STATE_BUCKET, key),
        subjects.dead_letter("nodeagent", subjects.kv_subject(subjects.ALLOC_BUCKET, key)),
        *(subjects.records(node, bucket) for bucket in subjects.BUCKETS),
    ]


@pytest.mark.parametrize("subject", said_by_agent(NODE))
def test_agent_may_publish_its_own_subjects(subject: str) -> None:
    assert any(covers(pattern, subject) for pattern in grants.agent(NODE).publish)


@pytest.mark.parametrize("subject", said_by_agent(OTHER))
def test_agent_may_not_say_it_for_another_node(subject: str) -> None:
    assert not any(covers(pattern, subject) for pattern in grants.agent(NODE).publish)


@pytest.mark.parametrize("subject", said_by_agent(NODE))
def test_agents_messages_are_exported_between_the_accounts(subject: str) -> None:
    config = grants.server_config(issuer="A", users=dict.fromkeys(grants.STATIC_USERS, "U"))
    passing = [line.split('"')[3] for line in config.splitlines() if '"service": "' in line]
    assert any(covers(pattern, subject) for pattern in passing)


def test_agent_may_subscribe_to_its_own_feed_and_requests() -> None:
    heard = grants.agent(NODE).subscribe
    assert subjects.alloc_feed(NODE) in heard
    assert any(covers(pattern, subjects.ask(NODE, "usage")) for pattern in heard)
    assert not any(covers(pattern, subjects.ask(OTHER, "usage")) for pattern in heard)


def test_only_scheduler_and_operator_may_write_the_ledger() -> None:
    record = subjects.kv_subject(subjects.ALLOC_BUCKET, subjects.allocation_key(NODE, UID))
    everybody = {
        "scheduler": grants.scheduler(),
        "registry": grants.registry(),
        "operator": grants.operator(),
        "webhook": grants.webhook(),
        "authenticator": grants.authenticator(),
        "agent": grants.agent(NODE),
        "integration": grants.integration("team_reader"),
    }
    writers = {
        name
        for name, grant in everybody.items()
        if any(covers(pattern, record) for pattern in grant.publish)
    }
    assert writers == {"scheduler", "operator"}
    outside = {name for name, grant in everybody.items() if grant.account != grants.HAMI}
    assert outside == {"webhook", "authenticator", "agent", "integration"}


def test_login_without_publish_rights_is_denied_everything() -> None:
    """An empty allow list would allow everything."""
    silent = grants.permissions(grants.authenticator())
    assert silent["publish"] == {"deny": [">"]}


def test_consumers_of_two_accounts_never_have_the_same_name() -> None:
    assert grants.consumer_of("a", "b.c") != grants.consumer_of("a-b", "c")
    assert grants.consumer_of("a", "b_c".replace("_", ".")) == "a_b_c"


@pytest.mark.parametrize("name", ["", "*", ">", "a b", "a.*", "_"])
def test_invalid_name_gets_no_grant(name: str) -> None:
    with pytest.raises(WireInvalid):
        grants.agent(name)
    with pytest.raises(WireInvalid):
        grants.consumer_of("team", name)


def test_configuration_needs_every_key() -> None:
    with pytest.raises(WireInvalid, match="scheduler has none"):
        grants.server_config(issuer="A", users={})


def test_region_receives_only_requests_to_itself() -> None:
    users = dict.fromkeys(grants.STATIC_USERS, "UKEY")
    hub = grants.Regions(public="UHUB", leaf_by_region={"east": "UEAST", "west": "UWEST"})
    text = grants.server_config(issuer="AISSUER", users=users, regions=hub)
    parts = [one for one in text.split("\n}\n") if one.startswith("accounts: ")]
    accounts = msgspec.json.decode(parts[0].removeprefix("accounts: ") + "\n}")
    found = {one["nkey"]: one for one in accounts[grants.REGIONS]["users"]}
    heard = found["UEAST"]["permissions"]["subscribe"]["allow"]
    assert "$JS.east.API.CONSUMER.>" in heard
    assert not any(covers(one, "$JS.S.delivery") or "west" in one for one in heard)


def test_sources_of_a_region_have_random_subjects_that_stay_in_the_region() -> None:
    users = dict.fromkeys(grants.STATIC_USERS, "UKEY")
    seeds = [NKey.generate("user").seed for _ in range(2)]
    tokens = [grants.source_token(seed) for seed in seeds]
    assert tokens[0] != tokens[1]
    assert grants.source_token(seeds[0] + "\n") == tokens[0], "a file may end with a newline"
    assert len(tokens[0]) == 32
    assert not any(tokens[0] in seed for seed in seeds)
    region = grants.Regions(public="U", region="east", source=tokens[0], hub="tls://h:1")
    text = grants.server_config(issuer="A", users=users, regions=region)
    assert f'"hami.source.{tokens[0]}.API.CONSUMER.CREATE.HAMI_EVENTS"' in text
    for subject in (grants.source_api(tokens[0]), grants.source_delivery(tokens[0])):
        assert any(covers(one, f"{subject}.x") for one in grants.KEPT_IN_REGION)
    with pytest.raises(WireInvalid, match="token"):
        grants.server_config(
            issuer="A", users=users, regions=grants.Regions(public="U", region="east")
        )
