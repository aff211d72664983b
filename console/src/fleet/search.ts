// SPDX-License-Identifier: Apache-2.0
// Finds devices by words. All words must match a device: `node:`, `model:`, `namespace:` (or `ns:`),
// `pod:`, `queue:`, `mode:` and `is:` (a state, or `mig`) name what to look at; other words match any
// of node, model, namespace and pod. Case does not count.

import { STATES, type State, stateOf } from "./state.ts";
import { FIELD, type Fleet, type FleetNode, ROW } from "./store.ts";

const KEYS = ["node", "model", "namespace", "pod", "queue", "mode", "is"] as const;
type Key = (typeof KEYS)[number];

interface Term {
  readonly key: Key | null;
  readonly text: string;
}

/** Devices that match, by node: one flag per device. */
export class Search {
  readonly text: string;
  readonly #terms: readonly Term[];
  #byNode = new WeakMap<FleetNode, Uint8Array>();
  #silent: ReadonlySet<string> | null = null;
  #words = new Map<string, boolean>();
  #vocabulary: object | null = null;

  constructor(text: string) {
    this.text = text;
    this.#terms = termsOf(text);
  }

  get isEmpty(): boolean {
    return this.#terms.length === 0;
  }

  /** One flag per device of the node. */
  of(fleet: Fleet, node: FleetNode): Uint8Array {
    if (this.#silent !== fleet.silent || this.#vocabulary !== fleet.words) {
      // Both are part of the answer, and are replaced when they change.
      this.#silent = fleet.silent;
      this.#vocabulary = fleet.words;
      this.#words.clear();
      this.#byNode = new WeakMap();
    }
    let flags = this.#byNode.get(node);
    if (flags === undefined) {
      flags = new Uint8Array(node.count);
      for (let at = 0; at < node.count; at += 1) {
        if (this.#terms.every((term) => this.#matches(fleet, node, at, term))) flags[at] = 1;
      }
      this.#byNode.set(node, flags);
    }
    return flags;
  }

  /** Number of devices that match. */
  count(fleet: Fleet): number {
    let sum = 0;
    for (const node of fleet.nodes) for (const flag of this.of(fleet, node)) sum += flag;
    return sum;
  }

  #matches(fleet: Fleet, node: FleetNode, at: number, { key, text }: Term): boolean {
    const word = (field: number): boolean =>
      this.#holds(fleet, node.devices[at * ROW + field] ?? 0, text);
    if (key === "is") {
      if (text === "mig") return word(FIELD.mode);
      return stateOf(fleet, node, at) === text;
    }
    if (key === "mode") return word(FIELD.mode);
    const isAny = key === null;
    if ((isAny || key === "node") && node.name.toLowerCase().includes(text)) return true;
    if ((isAny || key === "model") && (word(FIELD.model) || word(FIELD.vendor))) return true;
    if (key === "node" || key === "model") return false;
    const end = node.starts[at + 1] ?? 0;
    for (let s = node.starts[at] ?? 0; s < end; s += 1) {
      const owner = node.shares[s]?.allocation;
      if (owner === undefined) continue;
      if ((isAny || key === "namespace") && owner.namespace.toLowerCase().includes(text))
        return true;
      if ((isAny || key === "pod") && owner.pod.toLowerCase().includes(text)) return true;
      if (key === "queue" && owner.queue.toLowerCase().includes(text)) return true;
    }
    return false;
  }

  #holds(fleet: Fleet, number: number, text: string): boolean {
    const key = `${number} ${text}`;
    let found = this.#words.get(key);
    if (found === undefined) {
      found = fleet.words.text(number).toLowerCase().includes(text);
      this.#words.set(key, found);
    }
    return found;
  }
}

function termsOf(text: string): Term[] {
  return text
    .toLowerCase()
    .split(/\s+/)
    .filter((word) => word !== "")
    .map((word) => {
      const [head = "", ...rest] = word.split(":");
      const key = head === "ns" ? "namespace" : (head as Key);
      if (rest.length === 0 || !KEYS.includes(key)) return { key: null, text: word };
      return { key, text: rest.join(":") };
    });
}

/** The problem with a search text, as the word that no device can match; null: none. */
export function unknownState(text: string): string | null {
  for (const term of termsOf(text)) {
    if (term.key === "is" && term.text !== "mig" && !STATES.includes(term.text as State)) {
      return term.text;
    }
  }
  return null;
}
