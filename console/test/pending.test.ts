// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import type { Registry, Scheduler } from "../generated/api.ts";
import { CHANGES_SHOWN, changesShown, deviceRows, scoresOf } from "../src/views/pending/ways.ts";

function way(kind: Scheduler.Way["kind"], cost: number): Scheduler.Way {
  return { kind, cost, node: "n1" };
}

test("further changes of the request are left out, other ways stay in order", () => {
  const ways = [1, 2, 3, 4, 5].map((cost) => way("less", cost));
  const shown = changesShown([...ways, way("wait", 6), way("node", 7)]);
  assert.deepEqual(
    shown.map((one) => one.kind),
    [...Array(CHANGES_SHOWN).fill("less"), "wait", "node"],
  );
  assert.equal(shown[0]?.cost, 1);
});

const base: Registry.DecisionRecord = {
  verb: "filter",
  namespace: "team",
  pod: "p",
  pod_uid: "u",
  time_s: 1,
  verdict: "refused",
  snapshot_id: "1.1",
};

test("each device of the closest nodes has a row; a node without devices keeps its code", () => {
  const rows = deviceRows({
    ...base,
    closest: [
      {
        node: "n1",
        code: "CardInsufficientMemory",
        devices: [
          { uuid: "a", wanted: { memory_mib: 9 }, free: { memory_mib: 4 }, holders_left_out: 2 },
        ],
      },
      { node: "n2", code: "NodeUnregistered" },
    ],
  });
  assert.deepEqual(
    rows.map((row) => [row.node, row.uuid, row.code, row.free?.memory_mib, row.leftOut]),
    [
      ["n1", "a", "", 4, 2],
      ["n2", "", "NodeUnregistered", undefined, 0],
    ],
  );
  assert.deepEqual(deviceRows(base), []);
});

test("the newest score is used", () => {
  const scores = { node_policy: "binpack", device_policy: "spread" };
  assert.equal(scoresOf([base, { ...base, scores }]), scores);
  assert.equal(scoresOf([base]), undefined);
});
