// SPDX-License-Identifier: Apache-2.0
// Choices of the person at the browser: language, theme, namespace.

import { signal } from "@preact/signals";

export const LANGUAGES = ["en", "zh"] as const;
export type Language = (typeof LANGUAGES)[number];
export const THEMES = ["auto", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

const RECENT_MOST = 8;

/** The first supported language of the browser's list, else English. */
export function languageOf(stored: string | null, wanted: readonly string[]): Language {
  const candidates = [stored ?? "", ...wanted.map((tag) => tag.toLowerCase().split("-")[0] ?? "")];
  return LANGUAGES.find((one) => one === candidates.find((c) => isLanguage(c))) ?? "en";
}

function isLanguage(text: string): text is Language {
  return (LANGUAGES as readonly string[]).includes(text);
}

function themeOf(stored: string | null): Theme {
  return THEMES.find((one) => one === stored) ?? "auto";
}

const kept = globalThis.localStorage as Storage | undefined;
const tab = globalThis.sessionStorage as Storage | undefined;

export const language = signal<Language>(
  languageOf(kept?.getItem("hami-language") ?? null, globalThis.navigator?.languages ?? []),
);
export const theme = signal<Theme>(themeOf(kept?.getItem("hami-theme") ?? null));
/** The namespace that all views are limited to; empty: all namespaces. */
export const namespace = signal(tab?.getItem("hami-namespace") ?? "");
/** Namespaces that were chosen before, newest first. */
export const recentNamespaces = signal<string[]>(
  (kept?.getItem("hami-namespaces") ?? "").split(" ").filter(Boolean),
);

export function setLanguage(value: Language): void {
  language.value = value;
  kept?.setItem("hami-language", value);
}

export function setTheme(value: Theme): void {
  theme.value = value;
  kept?.setItem("hami-theme", value);
}

export function setNamespace(value: string): void {
  namespace.value = value;
  tab?.setItem("hami-namespace", value);
  if (!value) return;
  const others = recentNamespaces.value.filter((one) => one !== value);
  recentNamespaces.value = [value, ...others].slice(0, RECENT_MOST);
  kept?.setItem("hami-namespaces", recentNamespaces.value.join(" "));
}
