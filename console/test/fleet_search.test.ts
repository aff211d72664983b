// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import { Search, unknownState } from "../src/fleet/search.ts";
import { Fleet } from "../src/fleet/store.ts";
import { allocationOf, deviceOf, nodeOf, pack } from "./fleet_documents.ts";

function fleetOf(): Fleet {
  const fleet = new Fleet();
  fleet.load(
    pack([
      nodeOf(
        "gpu-1",
        [
          deviceOf({ used_slots: 2 }),
          deviceOf({ index: 1, model: "NVIDIA A30", mode: "mig", foreign_mib: 900 }),
        ],
        [
          allocationOf({ namespace: "team-a", pod: "train-0", queue: "research" }, { device: 0 }),
          allocationOf({ namespace: "team-b", pod: "serve-x" }, { device: 0 }),
        ],
      ),
      nodeOf("gpu-2", [deviceOf({ flags: 2 }), deviceOf({ index: 1, flags: 1 })]),
    ]),
  );
  return fleet;
}

function found(text: string, fleet = fleetOf()): string[] {
  const search = new Search(text);
  return fleet.nodes.flatMap((node) =>
    [...search.of(fleet, node)].flatMap((flag, at) => (flag ? [`${node.name}/${at}`] : [])),
  );
}

test("a word finds nodes, models, namespaces and pods", () => {
  assert.deepEqual(found("GPU-2"), ["gpu-2/0", "gpu-2/1"]);
  assert.deepEqual(found("a30"), ["gpu-1/1"]);
  assert.deepEqual(found("team-b"), ["gpu-1/0"]);
  assert.deepEqual(found("train"), ["gpu-1/0"]);
  assert.deepEqual(found("nothing-like-this"), []);
});

test("all words must match, each anywhere", () => {
  assert.deepEqual(found("team-a serve"), ["gpu-1/0"]);
  assert.deepEqual(found("gpu-1 a30"), ["gpu-1/1"]);
  assert.deepEqual(found("gpu-2 a30"), []);
});

test("a key limits what is looked at", () => {
  assert.deepEqual(found("pod:gpu"), []);
  assert.deepEqual(found("node:gpu-1"), ["gpu-1/0", "gpu-1/1"]);
  assert.deepEqual(found("ns:team-a"), ["gpu-1/0"]);
  assert.deepEqual(found("queue:research"), ["gpu-1/0"]);
  assert.deepEqual(found("model:h200 node:gpu-1"), ["gpu-1/0"]);
  assert.deepEqual(found("mode:mig"), ["gpu-1/1"]);
});

test("states are found", () => {
  assert.deepEqual(found("is:unhealthy"), ["gpu-2/0"]);
  assert.deepEqual(found("is:cordoned"), ["gpu-2/1"]);
  assert.deepEqual(found("is:foreign"), ["gpu-1/1"]);
  assert.deepEqual(found("is:booked"), ["gpu-1/0"]);
  assert.deepEqual(found("is:mig"), ["gpu-1/1"]);
  assert.equal(unknownState("is:broken"), "broken");
  assert.equal(unknownState("is:silent x"), null);
});

test("the answer follows changes of nodes, of silent agents, and a new snapshot", () => {
  const fleet = fleetOf();
  const search = new Search("is:silent");
  assert.equal(search.count(fleet), 0);
  fleet.apply(pack([], { silent: ["gpu-2"] }));
  assert.equal(search.count(fleet), 2);
  fleet.apply(pack([nodeOf("gpu-2", [deviceOf()])], { silent: null }));
  assert.equal(search.count(fleet), 1);
  fleet.load(pack([nodeOf("gpu-2", [deviceOf()])]));
  assert.equal(search.count(fleet), 0);
});
