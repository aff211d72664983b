// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import type { Registry } from "../generated/api.ts";
import { lanesOf, positionOf } from "../src/views/device/lanes.ts";
import {
  changeOf,
  commandsOf,
  KEPT,
  kindOf,
  podOf,
  type StreamEvent,
  withNewest,
} from "../src/views/events/tail.ts";
import { resizeOf } from "../src/views/workload/limits.ts";

function slice(begin: number, end: number | null): Registry.Slice {
  return {
    uuid: "A",
    begin_s: begin,
    end_s: end,
    namespace: "ns",
    pod: `p${begin}`,
    pod_uid: "",
    allocation_id: String(begin),
    memory_mib: 1,
    core_pct: 0,
    slots: 1,
    exclusive: false,
    parts: [],
    is_claim: false,
    reason: "",
  };
}

test("slices that overlap get lanes of their own, and a free lane is used again", () => {
  const { bars, count } = lanesOf([slice(120, 150), slice(100, 130), slice(160, null)], 100, 200);
  assert.equal(count, 2);
  assert.deepEqual(
    bars.map(({ slice: { pod }, lane, left, width }) => [pod, lane, left, width]),
    [
      ["p100", 0, 0, 30],
      ["p120", 1, 20, 30],
      ["p160", 0, 60, 40],
    ],
  );
});

test("slices are cut at the ends of the time shown, and left out beyond", () => {
  const { bars } = lanesOf([slice(0, 50), slice(0, 150), slice(300, null)], 100, 200);
  assert.deepEqual(
    bars.map(({ left, width }) => [left, width]),
    [[0, 50]],
  );
  assert.equal(positionOf(150, 100, 200), 50);
  assert.equal(positionOf(99, 100, 200), undefined);
});

function event(sequence: number): StreamEvent {
  return {
    sequence: String(sequence),
    id: "x",
    type: "io.hami.allocation.reserve.v1",
    source: "/scheduler/0",
    time: "2026-01-01T00:00:00Z",
    subject: "hami.v1.event.allocation.gpu-1.uid",
    data: { namespace: "team-a", pod: "p", node: 7 },
  };
}

test("the newest events are kept, newest first", () => {
  const many = Array.from({ length: KEPT }, (_, index) => event(index));
  const kept = withNewest(withNewest([], many), [event(9000), event(9001)]);
  assert.equal(kept.length, KEPT);
  assert.deepEqual(
    kept.slice(0, 3).map((one) => one.sequence),
    ["9001", "9000", String(KEPT - 1)],
  );
});

test("kind, change and pod come from subject, type and payload", () => {
  assert.equal(kindOf(event(1)), "allocation");
  assert.equal(changeOf(event(1)), "reserve");
  assert.deepEqual(podOf(event(1)), { namespace: "team-a", pod: "p" });
  assert.deepEqual(podOf({ ...event(1), data: {} }), { namespace: "", pod: "" });
});

test("commands name the filters and the next sequence", () => {
  const subscription = { stream: "S", filter_subjects: ["a.*", "b.>"], schemas: [] };
  assert.deepEqual(commandsOf(subscription, ["usage"], "8"), {
    nats: "nats consumer add S NAME --pull --ack explicit --filter 'a.*' --filter 'b.>'",
    hamictl: "hamictl events --follow --kind usage --from 8",
  });
  assert.equal(commandsOf(subscription, [], "").hamictl, "hamictl events --follow");
});

test("a resize names only what changes", () => {
  const pod = { namespace: "ns", pod: "p" };
  const now = { name: "main", memoryMib: 1000, corePct: 50 };
  assert.deepEqual(resizeOf(pod, now, "2000", "50"), {
    ...pod,
    container: "main",
    memory_mib: 2000,
  });
  assert.deepEqual(resizeOf(pod, now, "", "0"), { ...pod, container: "main", core_pct: 0 });
  assert.equal(resizeOf(pod, now, "1000", ""), undefined);
});
