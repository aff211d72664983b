// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import { formatAgo, formatDuration, formatMemory, formatPercent, NO_VALUE } from "../src/format.ts";
import { languageOf } from "../src/preferences.ts";
import { sorted } from "../src/ui/sort.ts";

test("memory is in MiB up to 10 GiB, then in GiB", () => {
  assert.equal(formatMemory(1_500, "en"), "1,500 MiB");
  assert.equal(formatMemory(10_239, "en"), "10,239 MiB");
  assert.equal(formatMemory(40_960, "en"), "40 GiB");
  assert.equal(formatMemory(null, "en"), NO_VALUE);
});

test("a percentage may have digits", () => {
  assert.equal(formatPercent(12.34, "en", 1), "12.3 %");
});

test("a duration has its two largest units", () => {
  const cases: [number, string][] = [
    [0.42, "0.4 s"],
    [42, "42 s"],
    [125, "2 min 5 s"],
    [3_600, "1 h"],
    [3_605, "1 h"],
    [273_600, "3 d 4 h"],
    [-60, "-1 min"],
  ];
  for (const [seconds, wanted] of cases) assert.equal(formatDuration(seconds, "en"), wanted);
});

test("a time is named by its distance", () => {
  assert.equal(formatAgo(0, 30_000, "en"), "30 sec. ago");
  assert.equal(formatAgo(0, 7_200_000, "en"), "2 hr. ago");
});

test("rows sort as people expect, missing values last", () => {
  const rows = ["gpu-10", "", "gpu-9", null];
  const same = (row: string | null) => row;
  assert.deepEqual(sorted(rows, same, false), ["gpu-9", "gpu-10", "", null]);
  assert.deepEqual(sorted(rows, same, true), ["gpu-10", "gpu-9", "", null]);
});

test("the language is the stored one, else the first that is supported", () => {
  assert.equal(languageOf("zh", ["en-US"]), "zh");
  assert.equal(languageOf(null, ["fr-FR", "zh-CN", "en"]), "zh");
  assert.equal(languageOf("xx", []), "en");
});
