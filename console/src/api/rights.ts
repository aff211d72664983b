// SPDX-License-Identifier: Apache-2.0
// Routes that the caller may call, so that the console offers no others. The server decides each request itself.

import { effect, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import type { GetRoutes, PostRoutes } from "../../generated/api.ts";
import { ApiError, get } from "./client.ts";
import { session } from "./session.ts";

export type RouteName = `GET ${keyof GetRoutes}` | `POST ${keyof PostRoutes}`;

/** Routes by namespace; empty: all namespaces. */
const known = signal<ReadonlyMap<string, ReadonlySet<string>>>(new Map());

effect(() => {
  if (session.value !== "open") known.value = new Map();
});

/** Returns whether the caller may call a route for the namespace; true until the answer is there. */
export function useRights(namespace: string): (route: RouteName) => boolean {
  const routes = known.value.get(namespace);
  useEffect(() => {
    if (routes === undefined) void load(namespace);
  }, [namespace, routes]);
  return (route) => routes === undefined || routes.has(route);
}

async function load(namespace: string): Promise<void> {
  try {
    const answer = await get("/v1/session", { query: { namespace } });
    known.value = new Map([...known.value, [namespace, new Set(answer.routes)]]);
  } catch (error) {
    // Without an answer everything is offered, and the server refuses what the caller may not do.
    if (!(error instanceof ApiError)) throw error;
  }
}
