// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { test } from "node:test";
import { texts } from "../generated/texts.ts";

type Texts = { readonly [key: string]: string | Texts };

function flat(tree: Texts, prefix = ""): Map<string, string> {
  const found = new Map<string, string>();
  for (const [key, value] of Object.entries(tree)) {
    if (typeof value === "string") found.set(prefix + key, value);
    else for (const [name, text] of flat(value, `${prefix}${key}.`)) found.set(name, text);
  }
  return found;
}

const placeholders = (text: string) => [...new Set(text.match(/\{\{\w+\}\}/g))].sort();

test("Chinese has the same texts as English, with the same placeholders", () => {
  const english = flat(texts.en);
  const chinese = flat(texts.zh);
  assert.deepEqual([...chinese.keys()].sort(), [...english.keys()].sort());
  for (const [key, text] of english) {
    assert.deepEqual(placeholders(chinese.get(key) ?? ""), placeholders(text), key);
  }
});

test("no text is empty", () => {
  for (const language of [texts.en, texts.zh]) {
    for (const [key, text] of flat(language)) assert.notEqual(text.trim(), "", key);
  }
});
