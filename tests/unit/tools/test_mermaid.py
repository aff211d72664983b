# SPDX-License-Identifier: Apache-2.0
"""Figures of pages: a line that Mermaid would reject is reported."""

import pytest

from tools.check_docs import mermaid_problem

SEQUENCE = """
sequenceDiagram
    autonumber
    participant K as kube-scheduler
    participant S as scheduler
    K->>S: filter
    S-->>K: nodes
    Note over K,S: one decision
    alt no node fits
        S-xK: refusal
    end
"""
FLOW = """
flowchart LR
    subgraph node
        A["agent"] -->|report| R[(registry)]
    end
    R -.-> S{fits?}
"""
STATES = """
stateDiagram-v2
    [*] --> reserved
    reserved --> bound: Binding created
    bound --> [*]
"""


@pytest.mark.parametrize("figure", [SEQUENCE, FLOW, STATES])
def test_known_figures_pass(figure: str) -> None:
    assert mermaid_problem(figure) == ""


@pytest.mark.parametrize(
    ("figure", "part"),
    [
        ("gantt\n  a: b", "not a kind of figure"),
        (SEQUENCE.replace("K->>S: filter", "K=>S filter"), "K=>S filter"),
        (SEQUENCE.replace("participant S as scheduler", "%% gone"), "without declaration: S"),
        (FLOW.replace("-->|report|", "-->>|report|"), "flowchart has no line"),
        (STATES.replace("bound --> [*]", "bound -> [*]"), "stateDiagram-v2 has no line"),
    ],
)
def test_broken_figures_are_reported(figure: str, part: str) -> None:
    assert part in mermaid_problem(figure)
