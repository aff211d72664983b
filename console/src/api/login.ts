// SPDX-License-Identifier: Apache-2.0

import { signal } from "@preact/signals";
import type { Registry } from "../../generated/api.ts";
import { ApiError, errorOf } from "./client.ts";
import { beginSession, session, token } from "./session.ts";

/** The caller as the server knows it, null before the session is open. */
export const caller = signal<Registry.Session | null>(null);

/** Check a token, or the absence of one, against the server, and open the session.
 *
 * Returns false if the server needs a token or rejects this one. Throws ApiError if it cannot answer.
 */
export async function login(candidate: string): Promise<boolean> {
  let response: Response;
  try {
    response = await fetch("/v1/session", {
      headers: candidate ? { Authorization: `Bearer ${candidate}` } : {},
      cache: "no-store",
    });
  } catch (error) {
    throw new ApiError(0, "unreachable", error instanceof Error ? error.message : String(error));
  }
  if (response.status === 401) return false;
  if (!response.ok) throw await errorOf(response);
  const answer = (await response.json()) as Registry.Session;
  if (answer.login === "token" && !answer.user) return false;
  caller.value = answer;
  beginSession(candidate);
  return true;
}

/** Open the session with the token of the tab, if the server accepts it. */
export async function resume(): Promise<void> {
  const known = token.value;
  if (!(await login(known))) session.value = known ? "rejected" : "login";
}
