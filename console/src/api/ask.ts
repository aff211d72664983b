// SPDX-License-Identifier: Apache-2.0

import { useEffect, useRef, useState } from "preact/hooks";
import type { PostRoutes } from "../../generated/api.ts";
import { ApiError, post } from "./client.ts";
import { forgetSource } from "./contact.ts";

export type Asked<Body, Data> = {
  /** The answer to the last question; undefined while a new one is computed. */
  data: Data | undefined;
  error: ApiError | undefined;
  isLoading: boolean;
  ask: (body: Body) => void;
  /** Ask the last question again. */
  reload: () => void;
};

/** POST a question on demand; a new question replaces the one that is not answered yet. */
export function useAsk<P extends keyof PostRoutes>(
  path: P,
): Asked<PostRoutes[P]["body"], PostRoutes[P]["answer"]> {
  type Body = PostRoutes[P]["body"];
  type Data = PostRoutes[P]["answer"];
  const [state, setState] = useState<{ data?: Data; error?: ApiError; isLoading: boolean }>({
    isLoading: false,
  });
  const closing = useRef<AbortController>();
  const last = useRef<Body>();

  useEffect(
    () => () => {
      closing.current?.abort();
      forgetSource(path);
    },
    [path],
  );

  async function send(body: Body): Promise<void> {
    closing.current?.abort();
    const mine = new AbortController();
    closing.current = mine;
    last.current = body;
    setState({ isLoading: true });
    try {
      setState({ data: await post(path, body, { signal: mine.signal }), isLoading: false });
    } catch (error) {
      if (mine.signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      setState({ error, isLoading: false });
    }
  }

  return {
    data: state.data,
    error: state.error,
    isLoading: state.isLoading,
    ask: (body) => void send(body),
    reload: () => {
      if (last.current !== undefined) void send(last.current);
    },
  };
}
