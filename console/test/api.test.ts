// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import { addressOf, errorOf } from "../src/api/client.ts";
import { Contacts, STALE_MS } from "../src/api/contact.ts";
import { EventParser } from "../src/api/sse.ts";
import { backoffMs, isTransient } from "../src/api/stream.ts";

test("an address has its parameters escaped and no empty query", () => {
  const address = addressOf(
    "/v1/explain/{namespace}/{pod}",
    { namespace: "a", pod: "b/c" },
    { limit: 0, namespace: "", since: undefined, name: "x y" },
  );
  assert.equal(address, "/v1/explain/a/b%2Fc?limit=0&name=x+y");
  assert.equal(addressOf("/v1/nodes"), "/v1/nodes");
});

test("an address with a missing parameter is refused", () => {
  assert.throws(() => addressOf("/v1/nodes/{node}"), /parameter node is missing/);
});

test("an error keeps code, message and further fields of the answer", async () => {
  const body = { error: { code: "forbidden", message: "no", resource: "pods" } };
  const error = await errorOf(new Response(JSON.stringify(body), { status: 403 }));
  assert.deepEqual([error.status, error.code, error.message], [403, "forbidden", "no"]);
  assert.equal(error.details.resource, "pods");
});

test("an error without an error object shows the status", async () => {
  const error = await errorOf(new Response("<html>", { status: 502, statusText: "Bad Gateway" }));
  assert.deepEqual([error.code, error.message], ["unexpected-answer", "502 Bad Gateway"]);
});

test("events are the same however the text is cut", () => {
  const text =
    ": comment\n\nid: 1\r\nevent: fleet\r\ndata: a\r\ndata: b\r\n\r\ndata:c\n\nevent: end\n\n";
  const wanted = [
    { id: "1", event: "fleet", data: "a\nb" },
    { id: "1", event: "message", data: "c" },
    { id: "1", event: "end", data: "" },
  ];
  for (let size = 1; size <= text.length; size += 1) {
    const parser = new EventParser();
    const events = [];
    for (let at = 0; at < text.length; at += size) {
      events.push(...parser.feed(text.slice(at, at + size)));
    }
    assert.deepEqual(events, wanted, `pieces of ${size}`);
  }
});

test("an unfinished event is not delivered", () => {
  assert.deepEqual(new EventParser().feed("data: a\n"), []);
});

test("pauses grow to ten seconds and differ between browsers", () => {
  assert.equal(backoffMs(0, 0), 250);
  assert.equal(backoffMs(0, 1), 500);
  assert.equal(backoffMs(20, 1), 10_000);
});

test("a stream that is refused is not tried again", () => {
  assert.deepEqual([429, 500, 503].map(isTransient), [true, true, true]);
  assert.deepEqual([400, 401, 403, 404].map(isTransient), [false, false, false, false]);
});

test("data is stale five seconds after the last contact of a failing source", () => {
  const contacts = new Contacts();
  contacts.succeed("a", 1_000);
  contacts.succeed("b", 2_000);
  assert.equal(contacts.staleSince(60_000), null, "silence without a failure is no loss");
  contacts.fail("b", 3_000);
  assert.equal(contacts.staleSince(2_000 + STALE_MS - 1), null);
  assert.equal(contacts.staleSince(2_000 + STALE_MS), 2_000);
  contacts.fail("a", 4_000);
  assert.equal(contacts.staleSince(9_000), 1_000);
  contacts.succeed("a", 9_000);
  contacts.forget("b");
  assert.equal(contacts.staleSince(90_000), null);
  assert.equal(contacts.isFailing, false);
});
