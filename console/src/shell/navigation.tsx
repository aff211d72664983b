// SPDX-License-Identifier: Apache-2.0

import { Link, useLocation } from "wouter-preact";
import { useRights } from "../api/rights.ts";
import { t } from "../i18n.ts";
import { namespace } from "../preferences.ts";
import { views } from "../views/index.ts";
import { GROUPS, linkOf, listed } from "../views/view.ts";

export function Navigation() {
  const [location] = useLocation();
  const may = useRights(namespace.value);
  const allowed = views.filter((view) => may(view.needs));
  return (
    <nav class="navigation" aria-label={t("shell.navigation")}>
      {allowed.length ? null : <p class="muted">{t("shell.noViews")}</p>}
      {GROUPS.map((group) => {
        const members = listed(allowed, group);
        if (!members.length) return null;
        return (
          <div key={group}>
            <h2>{t(`shell.groups.${group}`)}</h2>
            <ul>
              {members.map((view) => {
                const link = linkOf(view);
                const isCurrent = location === link || location.startsWith(`${link}/`);
                return (
                  <li key={view.name}>
                    <Link href={link} aria-current={isCurrent ? "page" : undefined}>
                      <svg viewBox="0 0 16 16" class="icon" aria-hidden="true">
                        <path d={view.icon} />
                      </svg>
                      {t(view.titleKey)}
                    </Link>
                  </li>
                );
              })}
            </ul>
          </div>
        );
      })}
    </nav>
  );
}
