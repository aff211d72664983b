// SPDX-License-Identifier: Apache-2.0
// Tells when shown data is stale: a source (a route or stream) that had no contact with the server for STALE_MS.

import { signal } from "@preact/signals";

export const STALE_MS = 5_000;

/** Failing sources by name, with the time of their last contact, in ms. */
export class Contacts {
  readonly #last = new Map<string, number>();
  readonly #failing = new Map<string, number>();

  succeed(source: string, now: number): void {
    this.#last.set(source, now);
    this.#failing.delete(source);
  }

  fail(source: string, now: number): void {
    if (!this.#failing.has(source)) this.#failing.set(source, this.#last.get(source) ?? now);
  }

  forget(source: string): void {
    this.#last.delete(source);
    this.#failing.delete(source);
  }

  get isFailing(): boolean {
    return this.#failing.size > 0;
  }

  /** The earliest last contact of a source that failed for STALE_MS, else null. */
  staleSince(now: number): number | null {
    const old = [...this.#failing.values()].filter((since) => now - since >= STALE_MS);
    return old.length ? Math.min(...old) : null;
  }
}

const contacts = new Contacts();
let timer: ReturnType<typeof setInterval> | undefined;

/** Time in ms since which some shown data is stale, else null. */
export const staleSince = signal<number | null>(null);

function update(): void {
  staleSince.value = contacts.staleSince(Date.now());
  if (contacts.isFailing && timer === undefined) timer = setInterval(update, 500);
  if (!contacts.isFailing && timer !== undefined) {
    clearInterval(timer);
    timer = undefined;
  }
}

export function reportContact(source: string): void {
  contacts.succeed(source, Date.now());
  update();
}

export function reportFailure(source: string): void {
  contacts.fail(source, Date.now());
  update();
}

/** Forget a source that no view shows any more. */
export function forgetSource(source: string): void {
  contacts.forget(source);
  update();
}
