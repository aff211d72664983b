# SPDX-License-Identifier: Apache-2.0
"""What counts as a report."""

import pytest

from hami_common import subjects
from hami_common.errors import WireInvalid
from hami_common.events import codec
from hami_registry.shell.reports import decode_report
from tests.support.registry import report


def test_report_of_the_named_node_is_taken() -> None:
    message = report("a", node="ip-10-0-0-1.internal")
    subject = subjects.report(message.node, message.vendor)
    assert decode_report(subject, codec.encode(message)) == message


@pytest.mark.parametrize(
    ("subject", "data", "problem"),
    [
        (subjects.report("n", "nvidia"), b"", "truncated"),
        (subjects.report("n", "nvidia"), b'{"node":"n"}', "vendor"),
        (subjects.report("m", "nvidia"), codec.encode(report("a", node="n")), "on node n"),
        (subjects.report("n", "amd"), codec.encode(report("a", node="n")), "of nvidia"),
        (subjects.report("n", "nvidia"), codec.encode(report("a", node="n.*")), "not a Kubernetes"),
    ],
)
def test_report_that_cannot_be_is_refused(subject: str, data: bytes, problem: str) -> None:
    with pytest.raises(WireInvalid) as caught:
        decode_report(subject, data)
    assert problem in str(caught.value)
