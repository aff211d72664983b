// SPDX-License-Identifier: Apache-2.0
// Keeps a fleet current: loads a snapshot, applies events after it, and starts over when the position is unknown.

import type { ApiError } from "../api/client.ts";
import type { Stream, StreamOptions } from "../api/stream.ts";
import type { FleetDocument } from "./document.ts";
import type { Fleet } from "./store.ts";

/** The registry, as far as it is needed. */
export type Source = {
  load: (signal: AbortSignal) => Promise<FleetDocument>;
  open: (since: string, options: Pick<StreamOptions, "onEvent" | "onRefused">) => Stream;
  /** Wait before the attempt with this number, from 0. */
  pause: (attempt: number) => Promise<void>;
};

export type Listener = {
  /** The fleet changed. */
  onChange: () => void;
  /** The registry refuses the caller, or is unavailable (then it is asked again); undefined: it answers. */
  onError: (error: ApiError | undefined) => void;
};

/** Follow the fleet until `stop` is called. */
export function follow(fleet: Fleet, source: Source, listener: Listener): { stop: () => void } {
  const stopping = new AbortController();
  let stream: Stream | undefined;

  async function start(): Promise<void> {
    for (let attempt = 0; !stopping.signal.aborted; attempt += 1) {
      try {
        const snapshot = await source.load(stopping.signal);
        if (stopping.signal.aborted) return;
        fleet.load(snapshot);
        listener.onError(undefined);
        listener.onChange();
        stream = source.open(fleet.id, { onEvent, onRefused: listener.onError });
        return;
      } catch (error) {
        if (stopping.signal.aborted) return;
        const { status } = error as ApiError;
        if (status === undefined) throw error;
        listener.onError(error as ApiError);
        if (status >= 400 && status < 500 && status !== 429) return;
        await source.pause(attempt);
      }
    }
  }

  function onEvent({ event, data }: { event: string; data: string }): void {
    if (stopping.signal.aborted) return;
    if (event === "fleet") {
      fleet.apply(JSON.parse(data) as FleetDocument);
      listener.onChange();
    } else if (event === "reset") {
      stream?.close();
      stream = undefined;
      void start();
    }
  }

  void start();
  return {
    stop: () => {
      stopping.abort();
      stream?.close();
    },
  };
}
