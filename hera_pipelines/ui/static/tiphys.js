// Optional comfort: every page is complete without it.
"use strict";

const localTimes = (root) => {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const moment = new Date(time.getAttribute("datetime"));
    const text = moment.toLocaleString();
    if (time.textContent.endsWith("ago")) time.title = text;
    else time.textContent = text;
  }
};

const copyButtons = (root) => {
  if (!navigator.clipboard) return;
  for (const button of root.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "Copied";
    });
  }
};

// The newest lines of a log are at its end.
const showEndsOfLogs = (root) => {
  for (const log of root.querySelectorAll("pre.log")) log.scrollTop = log.scrollHeight;
};

const enhance = (root) => {
  localTimes(root);
  copyButtons(root);
};

// What an element is called, to find it again in the page that takes its place.
const nameOf = (element) =>
  element.id || element.getAttribute("aria-label") || element.getAttribute("href") || element.textContent;

// Exchanges the content of the page; what was scrolled or in focus stays so.
const exchange = (main, fresh) => {
  const scrolled = new Map();
  for (const part of main.querySelectorAll(".scroll")) {
    const atEnd = part.scrollTop > 0 && part.scrollTop + part.clientHeight >= part.scrollHeight - 4;
    scrolled.set(nameOf(part), { left: part.scrollLeft, top: atEnd ? Infinity : part.scrollTop });
  }
  const focused = main.contains(document.activeElement) ? document.activeElement : null;
  main.replaceWith(fresh);
  for (const part of fresh.querySelectorAll(".scroll")) {
    const before = scrolled.get(nameOf(part));
    if (!before) continue;
    part.scrollLeft = before.left;
    part.scrollTop = Math.min(before.top, part.scrollHeight);
  }
  if (!focused) return;
  const same = [...fresh.querySelectorAll(focused.tagName)].find((element) => nameOf(element) === nameOf(focused));
  if (same) same.focus({ preventScroll: true });
};

// What a page shows, without ages, which grow on every page.
const contentOf = (main) => {
  const copy = main.cloneNode(true);
  for (const time of copy.querySelectorAll("time")) time.textContent = "";
  return copy.innerHTML;
};

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

// A slow store is asked for at most this share of the time, yet never later than in a minute.
const SHARE = 0.1;
const LONGEST_PAUSE_SECONDS = 60;
const SLOW_SECONDS = 15;

const SLOW = "slow to answer";

// Why the page is not new, beside the name of the store and outside of what is exchanged; "" if it is.
const showDelay = (reason) => {
  document.getElementById("delay").textContent = reason && `${reason}: this page may be old`;
};

// The content of this page as it is now; null while the server is away, or its store does not answer, or it refuses.
const load = async () => {
  const late = setTimeout(() => showDelay(SLOW), SLOW_SECONDS * 1000);
  let fresh = null;
  let reason = SLOW;
  try {
    const response = await fetch(location.href);
    if (response.ok) fresh = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("main");
    else if (response.status !== 503) reason = `answers ${response.status} ${response.statusText}`.trim();
  } catch (error) {
    // The next round asks again.
  }
  clearTimeout(late);
  showDelay(fresh ? "" : reason);
  return fresh;
};

// Whether a person types or chooses, which an exchange would undo.
const isEdited = (main) => main.querySelector("input:focus, select:focus") !== null;

// Loads the page again while it can change and is looked at, and exchanges its content if it has changed.
const follow = async (known) => {
  let took = 0;
  for (;;) {
    const main = document.getElementById("main");
    const every = Number(main.dataset.follow || 0);
    if (!every) return;
    await pause(Math.max(every, Math.min(took / SHARE, LONGEST_PAUSE_SECONDS)));
    while (document.hidden || isEdited(main)) await pause(1);
    const began = performance.now();
    const fresh = await load();
    took = (performance.now() - began) / 1000;
    if (!fresh || isEdited(main)) continue;
    const content = contentOf(fresh);
    if (content !== known) {
      for (const image of fresh.querySelectorAll("img.picture")) image.src += `?at=${Date.now()}`;
      enhance(fresh);
      exchange(main, fresh);
    }
    known = content;
  }
};

const first = contentOf(document.getElementById("main"));
enhance(document);
showEndsOfLogs(document);
follow(first);
