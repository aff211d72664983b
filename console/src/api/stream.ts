// SPDX-License-Identifier: Apache-2.0
// Streams of server-sent events, read by fetch because EventSource cannot send the token.

import type { QueryValue } from "./client.ts";
import { type ApiError, addressOf, errorOf, headersOf } from "./client.ts";
import { forgetSource, reportContact, reportFailure } from "./contact.ts";
import { endSession } from "./session.ts";
import { EventParser, type ServerEvent } from "./sse.ts";

/** The server sends a comment every 15 s; an open connection without one is lost. */
export const SILENT_MS = 20_000;
const BACKOFF_MS = 500;
const BACKOFF_MOST_MS = 10_000;

export type StreamOptions = {
  query?: Record<string, QueryValue>;
  /** Resume after the event with this id. */
  since?: string;
  onEvent: (event: ServerEvent) => void;
  onOpen?: () => void;
  /** The server refuses the request, for example with 403: the stream has ended. */
  onRefused?: (error: ApiError) => void;
};

export type Stream = { close: () => void };

/** Pause before the attempt with this number, from 0; half of it is random. */
export function backoffMs(attempt: number, random: number): number {
  const most = Math.min(BACKOFF_MS * 2 ** attempt, BACKOFF_MOST_MS);
  return most / 2 + (random * most) / 2;
}

/** May a request with this status succeed later without a change of the request? */
export function isTransient(status: number): boolean {
  return status === 429 || status >= 500;
}

/** Read a stream until it is closed; reconnect after the last event with growing pauses.
 *
 * Event `end` reconnects. Other events go to `onEvent`, `reset` of the fleet included.
 */
export function openStream(path: string, options: StreamOptions): Stream {
  const closing = new AbortController();
  void run(path, options, closing.signal);
  return {
    close: () => {
      closing.abort();
      forgetSource(path);
    },
  };
}

async function run(path: string, options: StreamOptions, closed: AbortSignal): Promise<void> {
  let lastId = options.since ?? "";
  let attempt = 0;
  while (!closed.aborted) {
    const connection = new AbortController();
    const abort = () => connection.abort();
    closed.addEventListener("abort", abort);
    let watchdog = setTimeout(abort, SILENT_MS);
    try {
      const headers = headersOf();
      if (lastId) headers["Last-Event-ID"] = lastId;
      const response = await fetch(addressOf(path, {}, options.query), {
        headers: { ...headers, Accept: "text/event-stream" },
        cache: "no-store",
        signal: connection.signal,
      });
      if (!response.ok && !isTransient(response.status)) {
        if (response.status === 401) endSession("rejected");
        options.onRefused?.(await errorOf(response));
        return;
      }
      if (!response.ok || !response.body) throw new Error(`status ${response.status}`);
      attempt = 0;
      reportContact(path);
      options.onOpen?.();
      const parser = new EventParser();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let ended = false; !ended; ) {
        const { done, value } = await reader.read();
        if (done || closed.aborted) break;
        clearTimeout(watchdog);
        watchdog = setTimeout(abort, SILENT_MS);
        reportContact(path);
        for (const event of parser.feed(value)) {
          if (event.id) lastId = event.id;
          if (event.event === "end") ended = true;
          else options.onEvent(event);
        }
      }
      connection.abort();
    } catch {
      // The connection failed or was silent for too long: try again.
    } finally {
      clearTimeout(watchdog);
      closed.removeEventListener("abort", abort);
    }
    if (closed.aborted) return;
    reportFailure(path);
    await pause(backoffMs(attempt, Math.random()), closed);
    attempt += 1;
  }
}

function pause(ms: number, closed: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(done, ms);
    function done(): void {
      clearTimeout(timer);
      closed.removeEventListener("abort", done);
      resolve();
    }
    closed.addEventListener("abort", done);
  });
}
