// SPDX-License-Identifier: Apache-2.0
// The format of server-sent events (HTML standard, section 9.2.6).

export type ServerEvent = { id: string; event: string; data: string };

/** Splits text into events; text may be cut at any place. Comments give no event. */
export class EventParser {
  #rest = "";
  #event = "";
  #data: string[] = [];
  #id = "";
  #endedWithReturn = false;

  feed(text: string): ServerEvent[] {
    let fresh = text;
    // "\r\n" may be cut in the middle: its second half is no line of its own.
    if (this.#endedWithReturn && fresh.startsWith("\n")) fresh = fresh.slice(1);
    if (fresh) this.#endedWithReturn = fresh.endsWith("\r");
    const lines = (this.#rest + fresh).split(/\r\n|\n|\r/);
    this.#rest = lines.pop() ?? "";
    const events: ServerEvent[] = [];
    for (const line of lines) {
      const event = this.#line(line);
      if (event) events.push(event);
    }
    return events;
  }

  #line(line: string): ServerEvent | undefined {
    if (line === "") {
      const event = { id: this.#id, event: this.#event || "message", data: this.#data.join("\n") };
      const isEmpty = !this.#data.length && !this.#event;
      this.#event = "";
      this.#data = [];
      return isEmpty ? undefined : event;
    }
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") this.#data.push(value);
    else if (name === "event") this.#event = value;
    else if (name === "id" && !value.includes("\0")) this.#id = value;
    return undefined;
  }
}
