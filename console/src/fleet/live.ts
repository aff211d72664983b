// SPDX-License-Identifier: Apache-2.0
// The fleet that views share: one stream per tab, for the caller and the chosen namespace.

import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { type ApiError, get } from "../api/client.ts";
import { token } from "../api/session.ts";
import { backoffMs, openStream } from "../api/stream.ts";
import { namespace } from "../preferences.ts";
import { follow } from "./follow.ts";
import { Fleet } from "./store.ts";

/** Time for which the stream stays open after the last view of the fleet was left. */
const LINGER_MS = 30_000;

export type Live = {
  fleet: Fleet;
  /** Grows with each change; 0: nothing is loaded yet. */
  revision: number;
  error: ApiError | undefined;
};

const NOTHING: Live = { fleet: new Fleet(), revision: 0, error: undefined };

const live = signal(NOTHING);
let current: { key: string; stop: () => void } | undefined;
let viewers = 0;
let leaving: ReturnType<typeof setTimeout> | undefined;

function start(key: string, chosen: string): void {
  const fleet = new Fleet();
  live.value = { fleet, revision: 0, error: undefined };
  const query = { namespace: chosen };
  const { stop } = follow(
    fleet,
    {
      load: (signal) => get("/v1/fleet", { query, signal }),
      open: (since, options) => openStream("/v1/fleet/events", { query, since, ...options }),
      pause: (attempt) =>
        new Promise((resolve) => setTimeout(resolve, backoffMs(attempt, Math.random()))),
    },
    {
      onChange: () => {
        live.value = { ...live.value, revision: fleet.revision };
      },
      onError: (error) => {
        live.value = { ...live.value, error };
      },
    },
  );
  current = { key, stop };
}

function stop(): void {
  current?.stop();
  current = undefined;
  live.value = NOTHING;
}

/** The fleet as far as the caller may see it; the component renders again with each change. */
export function useFleet(): Live {
  const chosen = namespace.value;
  // Another caller must not see what the one before was allowed to see.
  const key = `${token.value}\n${chosen}`;
  useEffect(() => {
    clearTimeout(leaving);
    viewers += 1;
    if (current?.key !== key) {
      stop();
      start(key, chosen);
    }
    return () => {
      viewers -= 1;
      if (viewers === 0) leaving = setTimeout(stop, LINGER_MS);
    };
  }, [key, chosen]);
  // Read in any case: the component renders again when it changes.
  const latest = live.value;
  return current?.key === key ? latest : NOTHING;
}

/** Load the snapshot again, for example after an error. */
export function reloadFleet(): void {
  if (current === undefined) return;
  const { key } = current;
  stop();
  start(key, namespace.value);
}
