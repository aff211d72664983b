// SPDX-License-Identifier: Apache-2.0

import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";
import type { ApiError } from "../api/client.ts";
import { t } from "../i18n.ts";

/** Heading of a view with its question, and actions at the right. */
export function Page(props: {
  title: string;
  intro?: string;
  actions?: ComponentChildren;
  children: ComponentChildren;
}) {
  return (
    <>
      <header class="page-head">
        <div>
          <h1>{props.title}</h1>
          {props.intro ? <p class="muted">{props.intro}</p> : null}
        </div>
        {props.actions ? <div class="actions">{props.actions}</div> : null}
      </header>
      {props.children}
    </>
  );
}

/** A framed section with a heading. */
export function Card(props: {
  title?: string;
  actions?: ComponentChildren;
  class?: string;
  children: ComponentChildren;
}) {
  const id = useId();
  return (
    <section class={`card ${props.class ?? ""}`} aria-labelledby={props.title ? id : undefined}>
      {props.title || props.actions ? (
        <header class="card-head">
          {props.title ? <h2 id={id}>{props.title}</h2> : <span />}
          {props.actions ? <div class="actions">{props.actions}</div> : null}
        </header>
      ) : null}
      {props.children}
    </section>
  );
}

/** Figures side by side. */
export function Figures({ children }: { children: ComponentChildren }) {
  return <dl class="figures">{children}</dl>;
}

/** One number with its label and, if given, a note below. */
export function Figure(props: {
  label: string;
  value: ComponentChildren;
  note?: ComponentChildren;
  tone?: Tone;
}) {
  return (
    <div class="figure" data-tone={props.tone}>
      <dt>{props.label}</dt>
      <dd>
        <span class="figure-value">{props.value}</span>
        {props.note ? <span class="figure-note">{props.note}</span> : null}
      </dd>
    </div>
  );
}

export type Tone = "ok" | "warn" | "bad" | "info" | "neutral";

/** State as text with a mark: the color is never the only sign. */
export function Status({ tone, children }: { tone: Tone; children: ComponentChildren }) {
  return (
    <span class="status" data-tone={tone}>
      <svg class="status-mark" viewBox="0 0 12 12" aria-hidden="true">
        <path d={MARKS[tone]} />
      </svg>
      {children}
    </span>
  );
}

const MARKS: Record<Tone, string> = {
  ok: "M2 6.5 5 9.5 10 3",
  warn: "M6 1.5v5.5M6 9.2v1.3",
  bad: "M2.5 2.5l7 7M9.5 2.5l-7 7",
  info: "M6 5v5.5M6 1.5v1.3",
  neutral: "M2.5 6h7",
};

/** A bar with label and value; `value` and `most` in the same unit. */
export function Meter(props: {
  label: string;
  value: number;
  most: number;
  /** The value as text, with unit. */
  text: ComponentChildren;
  /** The same as plain text for screen readers, if `text` is not a string. */
  valueText?: string;
  tone?: Tone;
  isLabelHidden?: boolean;
}) {
  const share = props.most > 0 ? Math.min(1, Math.max(0, props.value / props.most)) : 0;
  const plain = props.valueText ?? (typeof props.text === "string" ? props.text : undefined);
  return (
    <div class="meter">
      {props.isLabelHidden ? null : <span class="meter-label">{props.label}</span>}
      <div
        class="meter-bar"
        role="meter"
        aria-label={props.label}
        aria-valuemin={0}
        aria-valuemax={Math.max(props.most, props.value)}
        aria-valuenow={props.value}
        aria-valuetext={plain}
        data-tone={props.tone}
      >
        <div class="meter-fill" style={{ width: `${share * 100}%` }} />
      </div>
      <span class="meter-value">{props.text}</span>
    </div>
  );
}

export function Loading() {
  return (
    <p class="placeholder" role="status">
      {t("shell.loading")}
    </p>
  );
}

/** Shown instead of an empty table or chart: what is absent, and what would fill it. */
export function Empty({ children }: { children: ComponentChildren }) {
  return <p class="placeholder">{children}</p>;
}

/** An error of the API with what the caller can do about it. */
export function ErrorBox({ error, onRetry }: { error: ApiError; onRetry?: () => void }) {
  return (
    <div class="error-box" role="alert">
      <Status tone="bad">{titleOf(error)}</Status>
      <p>{error.message}</p>
      {error.status === 403 ? <p class="muted">{t("shell.errors.chooseNamespace")}</p> : null}
      <p class="muted code">{error.status ? `${error.status} ${error.code}` : error.code}</p>
      {onRetry ? (
        <button type="button" class="button" onClick={onRetry}>
          {t("shell.retry")}
        </button>
      ) : null}
    </div>
  );
}

function titleOf(error: ApiError): string {
  if (error.status === 0) return t("shell.errors.unreachable");
  if (error.status === 403) return t("shell.errors.forbidden");
  if (error.status === 404) return t("shell.errors.notFound");
  return error.status >= 500 ? t("shell.errors.unavailable") : t("shell.errors.failed");
}

/** The content once data exists; before that loading or the error, and a banner if a refresh failed. */
export function Answered<Data>(props: {
  answer: { data: Data | undefined; error: ApiError | undefined; reload: () => void };
  children: (data: Data) => ComponentChildren;
}) {
  const { data, error, reload } = props.answer;
  if (data === undefined) return error ? <ErrorBox error={error} onRetry={reload} /> : <Loading />;
  return (
    <>
      {error ? <ErrorBox error={error} onRetry={reload} /> : null}
      {props.children(data)}
    </>
  );
}
