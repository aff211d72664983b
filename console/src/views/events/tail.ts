// SPDX-License-Identifier: Apache-2.0

/** A CloudEvent of the stream, as `/v1/events` sends it. */
export type StreamEvent = {
  sequence: string;
  id: string;
  type: string;
  source: string;
  time: string;
  subject: string;
  data?: Record<string, unknown>;
};

export type Subscription = { stream: string; filter_subjects: string[]; schemas: string[] };

/** Events kept in the page, the newest first. */
export const KEPT = 500;

export function withNewest(
  kept: readonly StreamEvent[],
  fresh: readonly StreamEvent[],
): StreamEvent[] {
  return [...[...fresh].reverse(), ...kept].slice(0, KEPT);
}

export function kindOf(event: StreamEvent): string {
  return event.subject.split(".")[3] ?? "";
}

/** Namespace and name of the pod that the payload names; empty without one. */
export function podOf(event: StreamEvent): { namespace: string; pod: string } {
  const text = (value: unknown) => (typeof value === "string" ? value : "");
  return { namespace: text(event.data?.namespace), pod: text(event.data?.pod) };
}

/** The last two words of the type, such as `bind` of `io.hami.decision.bind.v1`. */
export function changeOf(event: StreamEvent): string {
  return event.type.split(".")[3] ?? event.type;
}

/** The commands by which a program gets the same events. */
export function commandsOf(
  subscription: Subscription,
  kinds: readonly string[],
  next: string,
): { nats: string; hamictl: string } {
  const filters = subscription.filter_subjects.map((one) => `--filter '${one}'`).join(" ");
  const only = kinds.map((one) => `--kind ${one}`).join(" ");
  const from = next ? ` --from ${next}` : "";
  return {
    nats: `nats consumer add ${subscription.stream} NAME --pull --ack explicit ${filters}`,
    hamictl: `hamictl events --follow${only ? ` ${only}` : ""}${from}`,
  };
}
