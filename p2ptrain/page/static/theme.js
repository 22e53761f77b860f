"use strict";
// Light or dark: the system's choice until somebody makes another here, which is remembered until it is taken back. The
// only script that is not deferred, and so the only one that runs before the first paint: a page that turns dark later
// flashes.
{
  const KEY = "p2ptrain-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const preferred = () => (system.matches ? "dark" : "light");

  /** @returns {"light" | "dark" | null} what was chosen here; null where nothing was, or nothing may be stored */
  function chosen() {
    try {
      const value = localStorage.getItem(KEY);
      return value === "light" || value === "dark" ? value : null;
    } catch {
      return null;
    }
  }

  /** @param {"light" | "dark"} theme what is no other than the system's is no choice to remember */
  function remember(theme) {
    try {
      if (theme === preferred()) localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, theme);
    } catch {
      // Private windows may refuse: then it holds until the page is left.
    }
  }

  /** Puts a theme in force and lets the canvases know, which resolve their colours themselves. */
  function apply(theme) {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      const other = theme === "dark" ? "light" : "dark";
      button.setAttribute("aria-label", `Switch to ${other} colours`);
      button.title = `Switch to ${other} colours`;
    }
    dispatchEvent(new Event("themechange"));
  }

  const wanted = () => chosen() ?? preferred();

  apply(wanted());
  system.addEventListener("change", () => apply(wanted()));
  addEventListener("DOMContentLoaded", () => {
    apply(wanted());
    document.getElementById("theme").addEventListener("click", () => {
      const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      remember(theme);
      apply(theme);
    });
  });
}
