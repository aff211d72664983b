// SPDX-License-Identifier: Apache-2.0

export type Pod = Record<string, unknown>;

/** A line that is not `name: value`. */
export class LineError extends Error {
  readonly line: string;

  constructor(line: string) {
    super(line);
    this.line = line;
  }
}

/** Read lines `name: value`; empty lines are skipped. Throws LineError. */
export function entriesOf(text: string): Record<string, string> {
  const found: Record<string, string> = {};
  for (const raw of text.split("\n")) {
    const line = raw.trim();
    if (!line) continue;
    const [, name, value] = /^(\S+?):\s+(.*)$/.exec(line) ?? [];
    if (!name || !value) throw new LineError(line);
    found[name] = value.replace(/^"(.*)"$/, "$1");
  }
  return found;
}

/** Equal pods with one container. */
export function podsOf(wanted: {
  count: number;
  namespace: string;
  limits: Record<string, string>;
  annotations: Record<string, string>;
}): Pod[] {
  return Array.from({ length: wanted.count }, (_, index) => ({
    kind: "Pod",
    metadata: {
      name: `pod-${index + 1}`,
      namespace: wanted.namespace,
      annotations: wanted.annotations,
    },
    spec: { containers: [{ name: "main", resources: { limits: wanted.limits } }] },
  }));
}
