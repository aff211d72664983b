// SPDX-License-Identifier: Apache-2.0
// Requests to the registry, typed by its OpenAPI documents.

import type { GetRoutes, PostRoutes } from "../../generated/api.ts";
import { reportContact, reportFailure, STALE_MS } from "./contact.ts";
import { endSession, token } from "./session.ts";

/** An answer with a status of 400 or more, or none at all: status 0, code `unreachable`. */
export class ApiError extends Error {
  readonly status: number;
  readonly code: string;
  /** All fields of the error object, beside `code` and `message` those of this error. */
  readonly details: Readonly<Record<string, unknown>>;

  constructor(
    status: number,
    code: string,
    message: string,
    details: Record<string, unknown> = {},
  ) {
    super(message);
    this.status = status;
    this.code = code;
    this.details = details;
  }
}

/** A request without an answer for this time has failed. */
export const REQUEST_MOST_MS = 30_000;

export type QueryValue = string | number | boolean | undefined;

export type RequestOptions<Names extends string> = {
  /** Values of `{name}` in the path. */
  params?: Record<string, string>;
  /** Empty and undefined values are left out. */
  query?: { [name in Names]?: QueryValue };
  signal?: AbortSignal;
};

/** Fill `{name}` in the path and append the query. Throws TypeError if a parameter is missing. */
export function addressOf(
  path: string,
  params: Record<string, string> = {},
  query: Record<string, QueryValue> = {},
): string {
  const filled = path.replace(/\{(\w+)\}/g, (_, name: string) => {
    const value = params[name];
    if (!value) throw new TypeError(`${path}: the parameter ${name} is missing`);
    return encodeURIComponent(value);
  });
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== "") search.set(name, String(value));
  }
  return search.size ? `${filled}?${search}` : filled;
}

/** Headers of every request: the session's token, and the marker that foreign pages cannot set. */
export function headersOf(method: "GET" | "POST" = "GET"): Record<string, string> {
  const headers: Record<string, string> = {};
  if (token.value) headers.Authorization = `Bearer ${token.value}`;
  if (method === "POST") {
    headers["Content-Type"] = "application/json";
    headers["X-HAMi-Console"] = "1";
  }
  return headers;
}

/** The error of an answer; a body that is no error object gives the status line. */
export async function errorOf(response: Response): Promise<ApiError> {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text) as { error: { code: string; message: string } };
    return new ApiError(response.status, error.code, error.message, error);
  } catch {
    const message = `${response.status} ${response.statusText}`.trim();
    return new ApiError(response.status, "unexpected-answer", message);
  }
}

/** GET a route. Throws ApiError; a status of 401 ends the session. */
export async function get<P extends keyof GetRoutes>(
  path: P,
  options: RequestOptions<GetRoutes[P]["query"]> = {},
): Promise<GetRoutes[P]["answer"]> {
  return (await request("GET", path, options, undefined)) as GetRoutes[P]["answer"];
}

/** POST a body as JSON. Throws ApiError; a status of 401 ends the session. */
export async function post<P extends keyof PostRoutes>(
  path: P,
  body: PostRoutes[P]["body"],
  options: RequestOptions<PostRoutes[P]["query"]> = {},
): Promise<PostRoutes[P]["answer"]> {
  return (await request("POST", path, options, JSON.stringify(body))) as PostRoutes[P]["answer"];
}

async function request(
  method: "GET" | "POST",
  path: string,
  options: RequestOptions<string>,
  body: string | undefined,
): Promise<unknown> {
  let response: Response;
  let answer: unknown;
  const signals = [AbortSignal.timeout(REQUEST_MOST_MS)];
  if (options.signal) signals.push(options.signal);
  // Data that is refreshed is stale while the server does not answer.
  const late = setTimeout(() => method === "GET" && reportFailure(path), STALE_MS);
  try {
    response = await fetch(addressOf(path, options.params, options.query), {
      method,
      headers: headersOf(method),
      credentials: "same-origin",
      cache: "no-store",
      ...(body === undefined ? {} : { body }),
      signal: AbortSignal.any(signals),
    });
    if (response.ok) answer = await response.json();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    reportFailure(path);
    throw new ApiError(0, "unreachable", error instanceof Error ? error.message : String(error));
  } finally {
    clearTimeout(late);
  }
  reportContact(path);
  if (response.ok) return answer;
  if (response.status === 401) endSession("rejected");
  throw await errorOf(response);
}
