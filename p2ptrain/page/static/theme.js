"use strict";
// Light or dark theme: the system's preference, or a stored choice that differs from it. The only script that is not
// deferred: it runs before the first paint, so the page does not flash.
{
  const KEY = "p2ptrain-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const preferred = () => (system.matches ? "dark" : "light");

  /** @returns {"light" | "dark" | null} the stored choice; null if there is none or storage is disabled */
  function chosen() {
    try {
      const value = localStorage.getItem(KEY);
      return value === "light" || value === "dark" ? value : null;
    } catch {
      return null;
    }
  }

  /** @param {"light" | "dark"} theme the system's own preference is not stored */
  function remember(theme) {
    try {
      if (theme === preferred()) localStorage.removeItem(KEY);
      else localStorage.setItem(KEY, theme);
    } catch {
      // Private windows may refuse: then the choice lasts until the page is closed.
    }
  }

  /** Applies a theme and notifies the canvases, which resolve their colours themselves. */
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
