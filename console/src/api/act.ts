// SPDX-License-Identifier: Apache-2.0

import { useState } from "preact/hooks";
import { ApiError } from "./client.ts";

export type Action = {
  isBusy: boolean;
  /** The error of the last attempt. */
  problem: ApiError | undefined;
  forget: () => void;
  /** Run the requests of an action; an ApiError becomes `problem`. */
  run: (requests: () => Promise<void>) => void;
};

/** An action that changes something, after a confirmation. */
export function useAction(): Action {
  const [isBusy, setBusy] = useState(false);
  const [problem, setProblem] = useState<ApiError>();

  async function attempt(requests: () => Promise<void>): Promise<void> {
    setBusy(true);
    setProblem(undefined);
    try {
      await requests();
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setProblem(error);
    } finally {
      setBusy(false);
    }
  }

  return {
    isBusy,
    problem,
    forget: () => setProblem(undefined),
    run: (requests) => void attempt(requests),
  };
}
