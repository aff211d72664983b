// SPDX-License-Identifier: Apache-2.0
// The caller's Kubernetes token, kept in the memory of the tab.

import { signal } from "@preact/signals";

const KEY = "hami-token";

export type SessionState = "unknown" | "open" | "login" | "rejected";

const stored = globalThis.sessionStorage;

export const token = signal(stored?.getItem(KEY) ?? "");
/** `unknown` until the first answer; `login`: a token is needed; `rejected`: the token was refused. */
export const session = signal<SessionState>("unknown");

export function beginSession(value: string): void {
  token.value = value;
  if (value) stored?.setItem(KEY, value);
  session.value = "open";
}

export function endSession(state: "login" | "rejected"): void {
  session.value = token.value ? state : "login";
  token.value = "";
  stored?.removeItem(KEY);
}
