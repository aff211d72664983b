// SPDX-License-Identifier: Apache-2.0

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import type { GetRoutes } from "../../generated/api.ts";
import { ApiError, get, type RequestOptions } from "./client.ts";
import { forgetSource } from "./contact.ts";

const TOO_MANY_REQUESTS = 429;
/** Requests of views that were left may still be answered; a place is free again soon. */
const BUSY_MS = 1000;

export type Answer<Data> = {
  /** The last answer, kept while later requests fail. */
  data: Data | undefined;
  /** The error of the last request, undefined after a success. */
  error: ApiError | undefined;
  isLoading: boolean;
  reload: () => void;
};

export type UseGetOptions<Names extends string> = Omit<RequestOptions<Names>, "signal"> & {
  /** Repeat the request at this interval, in seconds. */
  everyS?: number;
  /** False: send nothing yet, for example while a form is incomplete. */
  isEnabled?: boolean;
};

/** GET a route while the component is shown, again when path or query change. */
export function useGet<P extends keyof GetRoutes>(
  path: P,
  options: UseGetOptions<GetRoutes[P]["query"]> = {},
): Answer<GetRoutes[P]["answer"]> {
  type Data = GetRoutes[P]["answer"];
  const { everyS, isEnabled = true, params, query } = options;
  const key = JSON.stringify([path, params, query]);
  const [state, setState] = useState<{ key: string; data?: Data; error?: ApiError }>({ key });
  const [round, setRound] = useState(0);
  const latest = useRef({ params, query });
  latest.current = { params, query };

  // biome-ignore lint/correctness/useExhaustiveDependencies: `key` stands for path, params and query; `round` repeats.
  useEffect(() => {
    if (!isEnabled) return;
    const closing = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    async function ask(): Promise<void> {
      const { params, query } = latest.current;
      try {
        const data = await get(path, {
          ...(params ? { params } : {}),
          ...(query ? { query } : {}),
          signal: closing.signal,
        });
        setState({ key, data });
      } catch (error) {
        if (closing.signal.aborted) return;
        if (!(error instanceof ApiError)) throw error;
        if (error.status === TOO_MANY_REQUESTS) {
          timer = setTimeout(ask, BUSY_MS);
          return;
        }
        setState((before) => ({
          key,
          error,
          ...(before.key === key && before.data !== undefined ? { data: before.data } : {}),
        }));
      }
      if (everyS !== undefined && !closing.signal.aborted) timer = setTimeout(ask, everyS * 1000);
    }
    void ask();
    return () => {
      closing.abort();
      clearTimeout(timer);
      forgetSource(path);
    };
  }, [key, round, everyS, isEnabled]);

  const reload = useCallback(() => setRound((before) => before + 1), []);
  const isCurrent = state.key === key;
  const data = isCurrent ? state.data : undefined;
  const error = isCurrent ? state.error : undefined;
  return { data, error, isLoading: isEnabled && data === undefined && error === undefined, reload };
}
