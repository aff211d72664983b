// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import type { Registry } from "../generated/api.ts";
import { csvOf, focusRow } from "../src/views/usage/focus.ts";
import { formatDeviceTime, formatMoney, intervalOf } from "../src/views/usage/range.ts";

function row(name: string): Registry.ConsumptionRow {
  return {
    name,
    allocations: 1,
    reserved_s: 1800,
    used_s: 1,
    wasted_s: 1799,
    unmeasured_s: 0,
    idle_s: 0,
    whole_s: 3600,
    saved_s: 1800,
    overcommitted_s: 900,
    occupied_s: 3600,
    memory_mib_s: 3600 * 500,
    used_mib_s: 0,
    core_pct_s: 0,
    device_time_s: 0,
    throttled_s: 2.5,
    refusals: 3,
    cost: null,
    wasted_cost: null,
    whole_cost: null,
  };
}

function answer(by: Registry.Consumption["by"], name: string): Registry.Consumption {
  return {
    from_s: 1_800_000_000.5,
    to_s: 1_800_003_600,
    complete_since_s: 0,
    unknown: 0,
    cut: "",
    by,
    label: "",
    namespace: "",
    currency: "",
    unpriced: [],
    items: [row(name)],
    total: row(""),
    fleet: null,
  };
}

test("a range ends now, a custom one when it is chosen", () => {
  assert.deepEqual(intervalOf("1h", { from: "", to: "" }, 7_200_000), {
    from: "3600.000",
    to: "7200.000",
  });
  const custom = { from: "1970-01-01T00:00:10Z", to: "1970-01-01T00:00:20Z" };
  assert.deepEqual(intervalOf("custom", custom, 0), { from: "10.000", to: "20.000" });
  assert.equal(intervalOf("custom", { ...custom, to: "" }, 0), undefined);
  assert.equal(intervalOf("custom", { from: custom.to, to: custom.from }, 0), undefined);
});

test("CSV has a header and one line per row, without exponents and zeros at the end", () => {
  const [header, line, end] = csvOf(answer("namespace", "team-a")).split("\r\n");
  const cells = Object.fromEntries(
    (header ?? "").split(",").map((name, index) => [name, (line ?? "").split(",")[index]]),
  );
  assert.equal(end, "");
  assert.equal(cells.ConsumedQuantity, "0.5");
  assert.equal(cells.x_UsedHours, "0.000278");
  assert.equal(cells.x_MemoryMiBHours, "500");
  assert.equal(cells.BilledCost, "");
  assert.equal(cells.ChargePeriodStart, "2027-01-15T08:00:00.500Z");
  assert.equal(cells.SubAccountId, "team-a");
});

test("cells with separators are quoted", () => {
  assert.match(csvOf(answer("model", 'A "B", C')), /,"A ""B"", C",/);
});

test("a row names its pod and namespace", () => {
  const found = answer("pod", "ns/p");
  const cells = focusRow(found, row("ns/p"));
  assert.deepEqual(
    [cells.SubAccountId, cells.ResourceId, cells.ResourceType],
    ["ns", "ns/p", "Pod"],
  );
});

test("a SKU has its name, and its price its version", () => {
  const cells = focusRow(answer("sku", "s-8g@3"), row("s-8g@3"));
  assert.deepEqual([cells.SkuId, cells.SkuPriceId], ["s-8g", "s-8g@3"]);
  const tagged = focusRow({ ...answer("label", "vision"), label: "team" }, row("vision"));
  assert.equal(tagged.Tags, '{"team": "vision"}');
});

test("hours and money have two digits", () => {
  assert.equal(formatDeviceTime(5_400, "en"), "1.5 h");
  assert.equal(formatDeviceTime(125, "en"), "2 min 5 s");
  assert.equal(formatDeviceTime(null, "en"), "–");
  assert.equal(formatMoney(2.5, "EUR", "en"), "EUR\u00a02.50");
  assert.equal(formatMoney(null, "EUR", "en"), "–");
});
