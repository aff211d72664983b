// SPDX-License-Identifier: Apache-2.0

import { t } from "../i18n.ts";
import {
  LANGUAGES,
  type Language,
  language,
  setLanguage,
  setTheme,
  THEMES,
  type Theme,
  theme,
} from "../preferences.ts";

const NAMES: Record<Language, string> = { en: "English", zh: "中文" };

/** Language and theme. */
export function Preferences() {
  return (
    <>
      <label class="select">
        <span class="hidden">{t("shell.language")}</span>
        <select
          name="language"
          value={language.value}
          onChange={(event) => setLanguage(event.currentTarget.value as Language)}
        >
          {LANGUAGES.map((one) => (
            <option key={one} value={one} lang={one}>
              {NAMES[one]}
            </option>
          ))}
        </select>
      </label>
      <label class="select">
        <span class="hidden">{t("shell.theme")}</span>
        <select
          name="theme"
          value={theme.value}
          onChange={(event) => setTheme(event.currentTarget.value as Theme)}
        >
          {THEMES.map((one) => (
            <option key={one} value={one}>
              {t(`shell.themes.${one}`)}
            </option>
          ))}
        </select>
      </label>
    </>
  );
}
