// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import { setImmediate as turn } from "node:timers/promises";
import type { ApiError } from "../src/api/client.ts";
import type { FleetDocument } from "../src/fleet/document.ts";
import { follow, type Source } from "../src/fleet/follow.ts";
import { Fleet } from "../src/fleet/store.ts";
import { deviceOf, nodeOf, pack } from "./fleet_documents.ts";

type Opened = { since: string; options: Parameters<Source["open"]>[1]; isClosed: boolean };

function documentOf(id: string, ...nodes: string[]): FleetDocument {
  return pack(
    nodes.map((name) => nodeOf(name, [deviceOf()])),
    { id },
  );
}

function failure(status: number): ApiError {
  return Object.assign(new Error(`status ${status}`), { status }) as ApiError;
}

/** A registry that gives these answers one after the other. */
function registryOf(...answers: (FleetDocument | Error)[]) {
  const opened: Opened[] = [];
  const pauses: number[] = [];
  const source: Source = {
    load: async () => {
      const answer = answers.shift();
      if (answer === undefined) throw new Error("no answer is left");
      if (answer instanceof Error) throw answer;
      return answer;
    },
    open: (since, options) => {
      const one: Opened = { since, options, isClosed: false };
      opened.push(one);
      return {
        close: () => {
          one.isClosed = true;
        },
      };
    },
    pause: async (attempt) => {
      pauses.push(attempt);
    },
  };
  const fleet = new Fleet();
  const errors: (ApiError | undefined)[] = [];
  let changes = 0;
  const following = follow(fleet, source, {
    onChange: () => {
      changes += 1;
    },
    onError: (error) => errors.push(error),
  });
  return { fleet, opened, pauses, errors, following, changes: () => changes };
}

test("events are read from the position of the snapshot and applied, one change each", async () => {
  const site = registryOf(documentOf("1", "a"));
  await turn();
  assert.equal(site.opened[0]?.since, "1");
  site.opened[0]?.options.onEvent({
    event: "fleet",
    id: "2",
    data: JSON.stringify(documentOf("2", "b")),
  });
  assert.deepEqual(
    site.fleet.nodes.map((node) => node.name),
    ["a", "b"],
  );
  assert.equal(site.fleet.id, "2");
  assert.equal(site.changes(), 2);
});

test("reset loads a new snapshot and continues from there", async () => {
  const site = registryOf(documentOf("1", "a"), documentOf("9", "z"));
  await turn();
  site.opened[0]?.options.onEvent({ event: "reset", id: "", data: "{}" });
  await turn();
  assert.ok(site.opened[0]?.isClosed);
  assert.equal(site.opened[1]?.since, "9");
  assert.deepEqual(
    site.fleet.nodes.map((node) => node.name),
    ["z"],
  );
});

test("an unavailable registry is asked again with growing pauses, and its error is cleared", async () => {
  const site = registryOf(failure(503), failure(0), documentOf("1", "a"));
  await turn();
  assert.deepEqual(site.pauses, [0, 1]);
  assert.deepEqual(
    site.errors.map((error) => error?.status),
    [503, 0, undefined],
  );
  assert.equal(site.fleet.nodes.length, 1);
});

test("a refusal is reported and not repeated", async () => {
  const site = registryOf(failure(403));
  await turn();
  assert.deepEqual(
    site.errors.map((error) => error?.status),
    [403],
  );
  assert.equal(site.opened.length, 0);
});

test("after stop nothing is applied", async () => {
  const site = registryOf(documentOf("1", "a"));
  await turn();
  site.following.stop();
  assert.ok(site.opened[0]?.isClosed);
  const data = JSON.stringify(documentOf("2", "b"));
  site.opened[0]?.options.onEvent({ event: "fleet", id: "2", data });
  assert.equal(site.fleet.nodes.length, 1);
});
