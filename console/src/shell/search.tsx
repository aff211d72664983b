// SPDX-License-Identifier: Apache-2.0

import { useEffect, useId, useRef, useState } from "preact/hooks";
import { useLocation } from "wouter-preact";
import { useRights } from "../api/rights.ts";
import { t } from "../i18n.ts";
import { namespace } from "../preferences.ts";
import { views } from "../views/index.ts";
import { type Found, search } from "../views/view.ts";

/** Goes to a view or object; the key `/` focuses it. */
export function Search() {
  const id = useId();
  const input = useRef<HTMLInputElement>(null);
  const [text, setText] = useState("");
  const [chosen, setChosen] = useState(0);
  const [, navigate] = useLocation();
  const may = useRights(namespace.value);
  const allowed = views.filter((view) => may(view.needs));
  const found = search(allowed, text, (view) => t(view.titleKey), t("shell.view"));
  const current = Math.min(chosen, found.length - 1);
  const isOpen = text.trim() !== "";

  useEffect(() => {
    function focus(event: KeyboardEvent): void {
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
      if (isEditable(event.target) || document.querySelector("dialog[open]")) return;
      event.preventDefault();
      input.current?.focus();
    }
    document.addEventListener("keydown", focus);
    return () => document.removeEventListener("keydown", focus);
  }, []);

  function close(): void {
    setText("");
    setChosen(0);
  }

  function open(one: Found | undefined): void {
    if (!one) return;
    close();
    navigate(one.link);
    document.getElementById("content")?.focus();
  }

  function move(event: KeyboardEvent): void {
    if (event.key === "Escape") close();
    else if (event.key === "Enter") open(found[current]);
    else if (event.key === "ArrowDown") setChosen(Math.min(current + 1, found.length - 1));
    else if (event.key === "ArrowUp") setChosen(Math.max(current - 1, 0));
    else return;
    event.preventDefault();
  }

  return (
    <search class="search">
      <input
        ref={input}
        type="text"
        role="combobox"
        aria-label={t("shell.search")}
        aria-keyshortcuts="/"
        aria-expanded={isOpen}
        aria-controls={`${id}-results`}
        aria-autocomplete="list"
        aria-activedescendant={isOpen && found.length ? `${id}-${current}` : undefined}
        placeholder={t("shell.searchHint")}
        autocomplete="off"
        spellcheck={false}
        value={text}
        onInput={(event) => {
          setText(event.currentTarget.value);
          setChosen(0);
        }}
        onKeyDown={move}
        onBlur={close}
      />
      {isOpen && !found.length ? (
        <p class="search-results placeholder" role="status">
          {t("shell.nothingFound")}
        </p>
      ) : null}
      <div
        id={`${id}-results`}
        class={isOpen && found.length ? "search-results" : ""}
        role="listbox"
        aria-label={t("shell.searchResults")}
        hidden={!isOpen || !found.length}
      >
        {found.map((one, index) => (
          // biome-ignore lint/a11y/useKeyWithClickEvents: the input handles the keys of the list.
          // biome-ignore lint/a11y/useFocusableInteractive: the focus stays in the input, by aria-activedescendant.
          <div
            key={one.link}
            id={`${id}-${index}`}
            role="option"
            aria-selected={index === current}
            onMouseDown={(event) => event.preventDefault()}
            onClick={() => open(one)}
          >
            <span>{one.label}</span>
            <span class="muted">{one.kind}</span>
          </div>
        ))}
      </div>
    </search>
  );
}

function isEditable(target: EventTarget | null): boolean {
  return target instanceof Element && target.closest("input, select, textarea") !== null;
}
