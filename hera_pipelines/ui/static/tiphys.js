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
  const same = [...fresh.querySelectorAll(focused.tagName)].find((one) => nameOf(one) === nameOf(focused));
  if (same) same.focus({ preventScroll: true });
};

// What a page shows, without ages, which grow on every page.
const contentOf = (main) => {
  const copy = main.cloneNode(true);
  for (const time of copy.querySelectorAll("time")) time.textContent = "";
  return copy.innerHTML;
};

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

// The stream in which the server says that the page has changed. A hidden page has none, because a browser opens only
// six connections to a server.
const stream = { source: null, isRefused: false, isDue: false, wake: () => {} };
const QUIET_SECONDS = 15;

// Beside the name of the store, outside of what is exchanged.
const showSlowStore = (isSlow) => {
  document.getElementById("slow").textContent = isSlow ? "slow to answer: this page may be old" : "";
};

const openStream = (address) => {
  if (!address || document.hidden || stream.isRefused) {
    if (stream.source) stream.source.close();
    stream.source = null;
    showSlowStore(false);
  } else if (!stream.source) {
    stream.source = new EventSource(address);
    stream.source.addEventListener("slow", () => showSlowStore(true));
    stream.source.addEventListener("changed", () => {
      showSlowStore(false);
      stream.isDue = true;
      stream.wake();
    });
    stream.source.addEventListener("error", (event) => {
      stream.isRefused = event.target.readyState === EventSource.CLOSED;
      stream.wake();
    });
  }
  return Boolean(stream.source) && stream.source.readyState === EventSource.OPEN;
};
document.addEventListener("visibilitychange", () => stream.wake());

// Waits until the page may have changed: the server says so, or it has not for a while, or there is no stream.
const untilDue = async (main) => {
  const isTold = openStream(main.dataset.changes);
  const woken = new Promise((resolve) => {
    stream.wake = resolve;
  });
  if (!stream.isDue) await Promise.race([woken, pause(isTold ? QUIET_SECONDS : Number(main.dataset.follow))]);
  stream.isDue = false;
};

// Loads the page again while it can change, and exchanges its content if it has changed.
const follow = async (known) => {
  for (;;) {
    const main = document.getElementById("main");
    if (!Number(main.dataset.follow || 0)) break;
    await untilDue(main);
    while (main.querySelector("input:focus, select:focus")) await pause(1);
    if (document.hidden) continue;
    let fresh = null;
    try {
      const response = await fetch(location.href);
      if (response.ok) fresh = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("main");
    } catch (error) {
      // The server is away; the next round asks again.
    }
    if (!fresh) continue;
    const content = contentOf(fresh);
    if (content !== known) {
      for (const image of fresh.querySelectorAll("img.picture")) image.src += `?at=${Date.now()}`;
      enhance(fresh);
      exchange(main, fresh);
    }
    known = content;
  }
  openStream("");
};

const first = contentOf(document.getElementById("main"));
enhance(document);
showEndsOfLogs(document);
follow(first);
