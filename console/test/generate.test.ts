// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import { typeOf } from "../scripts/generate.ts";

test("schemas become types", () => {
  const cases: [Parameters<typeof typeOf>[0], string][] = [
    [{ $ref: "#/components/schemas/Node" }, "Registry.Node"],
    [{ type: "integer" }, "number"],
    [{ anyOf: [{ type: "string" }, { type: "null" }] }, "string | null"],
    [{ enum: ["a", "b"] }, '"a" | "b"'],
    [
      { type: "array", items: { anyOf: [{ type: "number" }, { type: "null" }] } },
      "(number | null)[]",
    ],
    [{ type: "array", prefixItems: [{ type: "string" }, { type: "number" }] }, "[string, number]"],
    [{ type: "object", additionalProperties: { type: "integer" } }, "Record<string, number>"],
    [{}, "unknown"],
  ];
  for (const [schema, wanted] of cases) assert.equal(typeOf(schema, "Registry."), wanted);
});

test("fields that are not required are optional", () => {
  const schema = {
    type: "object",
    properties: { a: { type: "string" }, b: { type: "boolean" } },
    required: ["a"],
  };
  assert.equal(typeOf(schema, ""), '{\n  "a": string;\n  "b"?: boolean;\n}');
});
