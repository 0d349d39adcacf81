// The page: gets the record of the run once, is told what changes of it, and has each part drawn anew from it.
// Everything that is shown follows from the record, which the server keeps bounded; so does what this page holds.

import { applied, parsed } from "./changes.js";
import { Archipelago } from "./archipelago.js";
import { drawCharts } from "./charts.js";
import { drawMap, drawRounds } from "./maps.js";
import { drawEvents, drawFigures, drawHeadline, drawLearners, drawLedger, drawWire } from "./tables.js";
import { byId, put } from "./words.js";

const SILENT_MS = 30_000; // the server says something every ten seconds
const AGAIN_MS = 3_000; // before another try where a browser would give up

let record = null;
let source = null;
let heardAt = 0;
let isDue = false;
const archipelago = new Archipelago(byId("archipelago"), byId("island-legend"));

function draw() {
  isDue = false;
  if (!record || document.hidden) return;
  drawHeadline(record);
  drawFigures(record);
  archipelago.draw(record);
  drawCharts(record);
  drawMap(record);
  drawRounds(record);
  drawLedger(record);
  drawWire(record);
  drawLearners(record);
  drawEvents(record);
  document.documentElement.dataset.number = String(Number(document.documentElement.dataset.number ?? 0) + 1);
}

function drawSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(draw);
}

function linked(state, words) {
  const link = byId("link");
  link.dataset.state = state;
  put(link, words);
}

async function begin() {
  source?.close();
  try {
    const answer = await fetch("api/run", { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const { number, record: whole } = parsed(await answer.text());
    record = whole;
    drawSoon();
    follow(number);
  } catch (error) {
    linked("lost", error instanceof TypeError ? "the page's server is not there; trying again" : error.message);
    setTimeout(begin, AGAIN_MS);
  }
}

function follow(number) {
  source = new EventSource(`api/events?since=${encodeURIComponent(number)}`);
  const heard = () => {
    heardAt = Date.now();
    linked("live", "live");
  };
  source.onopen = heard;
  source.addEventListener("beat", heard);
  source.addEventListener("change", (event) => {
    heard();
    record = applied(record, parsed(event.data));
    drawSoon();
  });
  source.addEventListener("whole", (event) => {
    heard();
    record = parsed(event.data).record;
    drawSoon();
  });
  source.onerror = () => {
    const isOver = source.readyState === EventSource.CLOSED;
    linked("lost", isOver ? "too many pages of this run are open; trying again" : "connection lost; trying again");
    if (isOver) setTimeout(begin, AGAIN_MS * 5);
  };
  heardAt = Date.now();
}

setInterval(() => {
  if (source && source.readyState === EventSource.OPEN && Date.now() - heardAt > SILENT_MS) begin();
}, SILENT_MS / 3);
document.addEventListener("visibilitychange", drawSoon);
window.addEventListener("resize", drawSoon);
document.addEventListener("chosen", drawSoon);
for (const query of ["(prefers-color-scheme: dark)", "(prefers-reduced-motion: reduce)"])
  matchMedia(query).addEventListener("change", () => {
    archipelago.forget();
    drawSoon();
  });
begin();
