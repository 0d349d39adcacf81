// The parts of the page that are text: headline, figures, ledger, bytes, learners, and what happened.
// Whatever comes from a learner, a file or a peer is put there as text.

import { stateWords } from "./archipelago.js";
import { byId, clock, compact, counted, fixed, isNumber, lasting, made, percent, put, size, whole } from "./words.js";

const EVENTS_SHOWN = 200;
const FIND_FROM = 12; // learners: fewer need no search
const GONE = ["lost", "left", "away", "expelled", "finished"];
const TROUBLE = { expelled: 0, lost: 1, stalled: 2, leaving: 3, joining: 4 };

export function drawHeadline(record) {
  const { status, headline } = record;
  document.body.dataset.mood = headline.mood;
  document.body.dataset.merges = status?.merges ? "some" : "none";
  document.title = status ? `${headline.word} ${percent(status.progress)} · ${status.run}` : "Skerry";
  put(byId("run"), status?.run ?? "");
  put(byId("badge"), headline.word);
  put(byId("sentence"), headline.sentence);
  put(byId("waits"), headline.waits ? `Waiting ${headline.waits}` : "");
  const bar = document.querySelector(".progress");
  const share = Math.min(1, Math.max(0, status?.progress ?? 0));
  bar.setAttribute("aria-valuenow", String(Math.round(100 * share)));
  bar.firstElementChild.style.width = `${100 * share}%`;
  rows(byId("notes"), notes(record), (row, text) => put(row, text), "li");
  put(byId("about"), `Skerry ${record.skerry} · ${record.folder}`);
}

function notes({ status, trouble }) {
  const told = trouble ? [trouble] : [];
  if (!status) return told;
  if (status.warning) told.push(status.warning);
  if (status.behind) told.push(`Behind: ${status.behind}`);
  if (status.disk) told.push(`The disk is about to be full: ${size(status.disk.free_bytes)} free, ${size(status.disk.needed_bytes)} taken soon.`);
  for (const [learner, why] of Object.entries(status.ahead ?? {}).slice(0, 5)) told.push(`${learner} was turned away: ${why}`);
  for (const each of (status.turned_away ?? []).slice(0, 5)) told.push(`${each.who} was turned away: ${each.why} (${counted(each.count, "time")})`);
  return told;
}

export function drawFigures(record) {
  const { status, history } = record;
  if (!status) return rows(byId("figures"), [], () => {}, "div");
  const learners = Object.values(status.learners);
  const training = learners.filter((each) => each.state === "training");
  const speed = training.reduce((sum, each) => sum + (each.tokens_per_s ?? 0), 0);
  const isOver = ["finished", "paused", "died"].includes(record.headline.mood);
  const traffic = history?.traffic;
  const sent = traffic ? traffic.up + traffic.down : 0;
  const figures = [
    isOver
      ? ["learners", whole(learners.length), "took part"]
      : ["learners training", whole(training.length), `of ${learners.length}${status.quorum ? `, quorum ${status.quorum}` : ""}`],
    isOver
      ? ["training", lasting(status.elapsed_s), "in all"]
      : ["tokens a second", training.length ? compact(speed) : "–", "worked on by learners"],
    ["tokens merged", compact(status.tokens.merged), `of ${compact(status.tokens.produced)} produced`],
    ["merges", whole(status.merges), status.merges ? `${fixed(status.contributors_mean, 1)} contributors each` : "none yet"],
    ["goodput", percent(history?.goodput, 1), "merged of what was possible"],
    ["on the wire", size(sent), sent ? beside(traffic.data_parallel, sent) : "both ways"],
  ];
  rows(byId("figures"), figures, (row, [name, value, more]) => cells(row, ["dt", name], ["dd", value], ["dd", more]), "div");
}

export function drawLedger({ status, history }) {
  const box = byId("ledger");
  if (!status) return box.replaceChildren();
  const { produced, merged, pending, discarded } = status.tokens;
  const lost = Object.entries(discarded).filter(([, n]) => n > 0);
  const parts = [["merged", merged, "in the model"], ["pending", pending, "may still be merged"]];
  for (const [why, n] of lost) parts.push([why, n, WHY_NOT[why] ?? "not merged"]);
  if (!box.firstChild) box.append(made("div", { class: "stack", "aria-hidden": "true" }), made("table", { class: "plain" }), made("p", { class: "read" }));
  const [stack, table, read] = box.children;
  rows(stack, parts, (bar, [name, n]) => {
    bar.className = name === "merged" ? "merged" : name === "pending" ? "pending" : "gone";
    bar.style.flexGrow = String(produced ? n / produced : 0);
  }, "span");
  const lines = [["produced", produced, "learners worked on"], ...parts];
  rows(table, lines, (row, [name, n, about]) => cells(row, ["th", name], ["td", whole(n)], ["td", produced ? percent(n / produced, 1) : "–"], ["td", about]), "tr");
  const balance = history?.ledger_balance;
  put(read, balance === undefined ? "" : balance === 0 ? "The books balance: produced = merged + pending + given up, to the token." : `The books are off by ${whole(balance)} tokens: run skerry replay.`);
  read.dataset.bad = balance ? "yes" : "";
}

const WHY_NOT = {
  died: "lost with a learner's process",
  "fast-forward": "given up by its learner, which went on from the model",
  "absent at close": "not in when the run closed",
  expelled: "of a learner that was turned out",
};

export function drawWire({ history }) {
  const traffic = history?.traffic;
  const box = byId("wire");
  if (!traffic) return box.replaceChildren();
  const { up, down, data_parallel: parallel } = traffic;
  const most = Math.max(up, down, parallel, 1);
  const bars = [["up", up, "sent"], ["down", down, "published"], ["data-parallel", parallel, "parallel"]];
  rows(box, bars, (row, [name, n, kind]) => {
    if (!row.firstChild) row.append(made("span", { class: "what" }), made("span", { class: "bar" }, made("i")), made("span", { class: "much" }));
    const [what, bar, much] = row.children;
    row.className = "wire";
    put(what, name);
    put(much, size(n));
    bar.firstChild.className = kind;
    bar.firstChild.style.width = `${Math.max(0.4, (100 * n) / most)}%`;
  }, "div");
  const sent = up + down;
  put(byId("wire-now"), sent ? beside(parallel, sent) : "");
}

function beside(parallel, sent) {
  const times = parallel / sent;
  return times >= 1.5 ? `${whole(times)} times less than data-parallel` : `data-parallel: ${size(parallel)}`;
}

// ---------------------------------------------------------------------------------------------- learners

const COLUMNS = [
  { name: "learner", value: (l) => l.name, text: (l) => l.name, isText: true },
  { name: "state", value: (l) => TROUBLE[l.state] ?? 9, text: (l) => l.state, isText: true },
  { name: "tokens/s", value: (l) => speed(l), text: (l) => (l.state === "training" ? whole(speed(l)) : "–") },
  { name: "steps", value: (l) => l.steps, text: (l) => whole(l.steps), isWide: true },
  { name: "step time", value: (l) => l.step_s, text: (l) => (l.step_s ? lasting(l.step_s) : "–"), isWide: true },
  { name: "loss", value: (l) => l.loss, text: (l) => (l.loss ? fixed(l.loss, 3) : "–"), isWide: true },
  { name: "in merges", value: (l) => l.past.participation, text: (l) => percent(l.past.participation) },
  { name: "merged share", value: (l) => l.past.merged_share, text: (l) => percent(l.past.merged_share, 1), bar: (l) => l.past.merged_share },
  { name: "unmerged", value: (l) => l.unmerged_steps, text: (l) => (isNumber(l.unmerged_steps) ? counted(l.unmerged_steps, "step") : "–"), isWide: true },
  { name: "up", value: (l) => l.bytes_up, text: (l) => size(l.bytes_up), isWide: true },
  { name: "down", value: (l) => l.bytes_down, text: (l) => size(l.bytes_down), isWide: true },
  { name: "heard", value: (l) => l.heard_s, text: (l) => (GONE.includes(l.state) || !isNumber(l.heard_s) ? "–" : l.heard_s ? `${lasting(l.heard_s)} ago` : "now"), isWide: true },
];
const order = { column: 1, isDown: false };
const speed = (learner) => (learner.state === "training" ? (learner.tokens_per_s ?? 0) : 0);
let lastRecord = null;

export function drawLearners(record) {
  lastRecord = record;
  const past = record.history?.learners ?? {};
  const all = Object.entries(record.status?.learners ?? {}).map(([name, each]) => ({ name, ...each, past: past[name] ?? {} }));
  const live = all.filter((each) => !GONE.includes(each.state)).length;
  const taking = all.filter((each) => each.past.is_participating).length;
  const isOver = ["finished", "paused", "died"].includes(record.headline.mood);
  put(byId("learners-now"), isOver ? counted(all.length, "learner") : all.length ? `${live} live, ${taking} took part in the latest merges, ${all.length} known` : "none yet");
  byId("find-box").hidden = all.length < FIND_FROM;
  const wanted = byId("find").value.trim().toLowerCase();
  const shown = all.filter((each) => each.name.toLowerCase().includes(wanted) || each.state.includes(wanted)).sort(compared);
  const table = byId("learners-table");
  if (!table.tHead) begin(table);
  [...table.tHead.rows[0].cells].forEach((cell, i) => {
    cell.setAttribute("aria-sort", i !== order.column ? "none" : order.isDown ? "descending" : "ascending");
  });
  const top = Math.max(1e-9, ...all.map((each) => each.past.merged_share ?? 0));
  rows(table.tBodies[0], shown, (row, learner) => {
    row.className = learner.state;
    COLUMNS.forEach((column, i) => {
      const cell = row.cells[i] ?? row.insertCell();
      if (!cell.firstChild) {
        cell.className = `${column.isText ? "words" : ""} ${column.isWide ? "wide" : ""} ${column.name === "state" ? "state" : ""}`;
        cell.append(made("i"), made("span"));
      }
      put(cell.lastChild, column.text(learner));
      if (column.name === "state") cell.title = `${learner.name} ${stateWords(learner.state)}`;
      if (column.bar) cell.firstChild.style.width = `${(48 * (column.bar(learner) ?? 0)) / top}px`;
    });
  }, "tr");
}

function compared(a, b) {
  const column = COLUMNS[order.column];
  const [x, y] = [column.value(a) ?? -1, column.value(b) ?? -1];
  const sign = x < y ? -1 : x > y ? 1 : 0;
  return sign ? (order.isDown ? -sign : sign) : a.name.localeCompare(b.name, "en", { numeric: true });
}

function begin(table) {
  const head = table.createTHead().insertRow();
  table.createTBody();
  COLUMNS.forEach((column, i) => {
    const button = made("button", { type: "button" }, column.name);
    button.addEventListener("click", () => {
      order.isDown = order.column === i ? !order.isDown : !column.isText;
      order.column = i;
      drawLearners(lastRecord);
    });
    head.append(made("th", { scope: "col", class: `${column.isText ? "words" : ""} ${column.isWide ? "wide" : ""}` }, button));
  });
  byId("find").addEventListener("input", () => drawLearners(lastRecord));
}

// ---------------------------------------------------------------------------------------------- what happened

export function drawEvents({ history }) {
  const events = (history?.events ?? []).slice(-EVENTS_SHOWN).reverse();
  rows(byId("events"), events, (row, event) => {
    if (!row.firstChild) row.append(made("time"), made("span", { class: "text" }), made("span", { class: "cost" }));
    const [time, text, cost] = row.children;
    row.className = event.kind.replaceAll(" ", "-");
    put(time, clock(event.t));
    time.title = new Date(1000 * event.at).toLocaleString();
    put(text, event.text);
    put(cost, costs(event));
  }, "li");
}

function costs(event) {
  const said = [];
  if (isNumber(event.cost_s)) said.push(lasting(event.cost_s));
  if (isNumber(event.cost_tokens)) said.push(`${compact(event.cost_tokens)} tokens`);
  return said.join(", ");
}

// ---------------------------------------------------------------------------------------------- rows

// As many children as there are things, each filled anew; those that are there are used again.
function rows(parent, things, fill, tag) {
  while (parent.children.length > things.length) parent.lastElementChild.remove();
  things.forEach((thing, i) => fill(parent.children[i] ?? parent.appendChild(document.createElement(tag)), thing));
}

function cells(row, ...wanted) {
  wanted.forEach(([tag, text], i) => put(row.children[i] ?? row.appendChild(document.createElement(tag)), text));
}
