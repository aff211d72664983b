// SPDX-License-Identifier: Apache-2.0
// Texts in the chosen language; src/i18n/LANGUAGE/NAME.json has those of view NAME.

import { createInstance } from "i18next";
import { type TextKey, texts } from "../generated/texts.ts";
import { language } from "./preferences.ts";

export type { TextKey };

const i18n = createInstance();
void i18n.init({
  lng: language.value,
  fallbackLng: "en",
  initAsync: false,
  nsSeparator: false,
  resources: Object.fromEntries(
    Object.entries(texts).map(([name, translation]) => [name, { translation }]),
  ),
  // Preact escapes text.
  interpolation: { escapeValue: false },
});

/** The text in the chosen language; components that call it render again when the language changes. */
export function t(key: TextKey, values: Record<string, string | number> = {}): string {
  return i18n.t(key, { lng: language.value, ...values });
}

/** Like `t` for a key made from a value of the API; `otherwise` if no such text exists. */
export function tValue(prefix: string, value: string, otherwise = value): string {
  return i18n.t(`${prefix}.${value}`, { lng: language.value, defaultValue: otherwise });
}
