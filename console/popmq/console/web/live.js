"use strict";
// Asks for the same page again and again, and changes what differs; forms keep what was typed.
// A page that is hidden asks for nothing.  The server escapes all texts, and DOMParser runs no
// script of what it parses.

const PAUSE_MS = 1000;
const SLOW_MS = 3000;  // after which a page says that it may be old
const PATIENCE_MS = 15000;
const main = document.getElementById("main");
const state = document.getElementById("state");
const pulse = document.getElementById("pulse");
let timer = 0;
let asking = false;

function show(text) {
  state.hidden = text === "";
  if (state.textContent !== text) state.textContent = text;
  main.classList.toggle("stale", text !== "");
}

function isSame(have, want) {
  return have && have.nodeType === want.nodeType && have.nodeName === want.nodeName &&
    (have.id || "") === (want.id || "");
}

function morph(have, want) {
  if (have.nodeType !== Node.ELEMENT_NODE) {
    if (have.data !== want.data) have.data = want.data;
    return;
  }
  const kept = have.dataset.keep;  // what the form is about: one that is about other things changes
  if (kept !== undefined && kept === want.dataset.keep) return;
  for (const { name, value } of want.attributes) {
    if (have.getAttribute(name) !== value) have.setAttribute(name, value);
  }
  for (const { name } of [...have.attributes]) {
    const ofThePerson = name === "open" && have.nodeName === "DETAILS";
    if (!want.hasAttribute(name) && !ofThePerson) have.removeAttribute(name);
  }
  morphChildren(have, want);
}

function morphChildren(have, want) {
  const named = new Map([...have.children].filter((child) => child.id).map((child) => [child.id, child]));
  let at = have.firstChild;
  for (const next of [...want.childNodes]) {
    const known = next.id && named.get(next.id);
    if (known && known !== at && isSame(known, next)) {
      have.insertBefore(known, at);
      morph(known, next);
    } else if (isSame(at, next)) {
      const here = at;
      at = at.nextSibling;
      morph(here, next);
    } else {
      have.insertBefore(document.importNode(next, true), at);
    }
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}

async function look() {
  let answer;
  let page;
  const slow = setTimeout(show, SLOW_MS, "The console is slow to answer. What is below may be old. Trying again.");
  try {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    answer = await fetch(location.href, { cache: "no-store", headers: { "x-live": "1" }, signal });
    if (answer.status === 401) {
      location.reload();  // the session is over: what it showed goes, and the login comes
      return;
    }
    page = new DOMParser().parseFromString(await answer.text(), "text/html");
  } catch {
    show("The console does not answer. What is below may be old. Trying again.");
    return;
  } finally {
    clearTimeout(slow);
  }
  const next = page.getElementById("main");
  if (!next) {
    show("The console refused to show this page.");
  } else if (answer.ok || !main.querySelector("h1") || main.dataset.failed) {
    main.dataset.failed = answer.ok ? "" : "yes";
    morphChildren(main, next);
    document.title = page.title;
    show("");
  } else {
    const reason = next.querySelector(".notice");
    show(`${reason ? reason.textContent : "No answer."} What is below may be old. Trying again.`);
  }
}

async function live() {
  clearTimeout(timer);
  if (document.hidden) {
    pulse.textContent = "Paused while hidden.";
    return;
  }
  if (asking) return;  // what runs goes on by itself
  asking = true;
  await look();
  asking = false;
  pulse.textContent = "Live.";
  timer = setTimeout(live, PAUSE_MS);
}

const THEMES = ["auto", "light", "dark"];
const button = document.getElementById("theme");

function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
  button.textContent = `Theme: ${theme}`;
  localStorage.setItem("theme", theme);
}

button.hidden = false;
const kept = localStorage.getItem("theme");
useTheme(THEMES.includes(kept) ? kept : "auto");
button.addEventListener("click", () => {
  const at = THEMES.indexOf(document.documentElement.dataset.theme);
  useTheme(THEMES[(at + 1) % THEMES.length]);
});

// A button that was pressed once sends its form once.
document.addEventListener("submit", (event) => {
  if (event.target.method !== "post") return;
  if (event.target.dataset.sent) event.preventDefault();
  event.target.dataset.sent = "yes";
});
window.addEventListener("pageshow", () => {
  for (const form of document.forms) delete form.dataset.sent;
});

if (main.dataset.live === "yes") {
  pulse.textContent = "Live.";
  document.addEventListener("visibilitychange", live);
  timer = setTimeout(live, PAUSE_MS);
}
