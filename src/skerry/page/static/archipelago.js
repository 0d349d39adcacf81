// Learners as islands around the syncer. An island's size is its share of the merged tokens, the arc around it its speed
// beside the fastest, its colour and mark its state. Packets move where fragments travel: up when a learner's bytes
// grow, down when there is a new version. Who asked for less motion sees lines light up instead.

import { compact, counted, drawn, lasting, made, percent, put } from "./words.js";

const ROUND_MAX = 10; // islands that stand in one ring; more lie in rows, a little out of line
const LABELS_MAX = 28;
const PACKETS_MAX = 48; // on their way at the same time
const SPREAD_MS = 900; // over which the packets of one look set out
const CELL = { few: { width: 128, height: 92 }, many: { width: 37, height: 36 }, tiny: { width: 23, height: 23 } }; // the room of an island in a row
const STATES = {
  training: "trains",
  joining: "joins",
  stalled: "has not stepped for a while",
  stopped: "has stopped",
  leaving: "leaves",
  lost: "is lost",
  left: "has left",
  away: "is away",
  expelled: "was turned out",
  finished: "has finished",
};
const MARKS = { lost: "×", stalled: "!", joining: "+", leaving: "→", expelled: "×" };

export const stateWords = (state) => STATES[state] ?? state;

export class Archipelago {
  constructor(box, legend) {
    this.box = box;
    this.svg = drawn("svg", { role: "img" });
    this.layers = {};
    for (const name of ["lines", "packets", "islands"]) {
      this.layers[name] = drawn("g", { class: name });
      this.svg.append(this.layers[name]);
    }
    box.append(this.svg);
    this.legend = legend;
    this.islands = new Map();
    this.packets = [];
    this.before = null;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.syncer = makeSyncer();
    this.layers.islands.append(this.syncer);
  }

  forget() {
    this.before = null;
  }

  draw(record) {
    const learners = record.status?.learners ?? {};
    const names = Object.keys(learners);
    const width = Math.max(280, this.box.clientWidth);
    const isNarrow = width < 560;
    const rows = names.length > ROUND_MAX ? placed(names.length, width) : null;
    const height = rows ? rows.height : isNarrow ? 400 : 330;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.centre = { x: width / 2, y: height / 2 };
    this.syncer.setAttribute("transform", `translate(${this.centre.x} ${this.centre.y})`);
    this.syncer.dataset.mood = record.headline.mood;
    this.place(names, learners, record.history?.learners ?? {}, rows?.spots ?? ring(names.length, width, height));
    this.move(record, learners);
    this.tell(learners, names, record.headline.mood);
  }

  place(names, learners, past, spots) {
    const fastest = Math.max(1e-9, ...names.map((name) => learners[name].tokens_per_s ?? 0));
    for (const [name, island] of this.islands)
      if (!(name in learners)) {
        island.remove();
        this.islands.delete(name);
      }
    names.forEach((name, index) => {
      let island = this.islands.get(name);
      if (!island) this.islands.set(name, (island = new Island(name, this.layers)));
      const share = past[name]?.merged_share ?? 1 / names.length;
      island.draw(this.centre, spots[index], learners[name], share, names.length, (learners[name].tokens_per_s ?? 0) / fastest);
    });
  }

  move(record, learners) {
    const now = { merges: record.status?.merges ?? 0, up: Object.create(null) };
    for (const [name, each] of Object.entries(learners)) now.up[name] = each.bytes_up ?? 0;
    const before = this.before;
    this.before = now;
    if (!before || record.headline.mood === "finished") return;
    const ways = [];
    for (const name of Object.keys(learners)) {
      const island = this.islands.get(name);
      if (now.up[name] > (before.up[name] ?? Infinity)) ways.push([island.at, this.centre, "up", island]);
      if (now.merges > before.merges && learners[name].state === "training")
        ways.push([this.centre, island.at, "down", island]);
    }
    for (const way of shuffled(ways).slice(0, PACKETS_MAX)) this.calm.matches ? way[3].glow() : this.send(...way);
  }

  send(from, to, kind) {
    let packet = this.packets.find((each) => !each.isBusy);
    if (!packet) {
      if (this.packets.length >= PACKETS_MAX) return;
      packet = { dot: drawn("circle", { r: 3.2, class: "packet" }), isBusy: false };
      this.layers.packets.append(packet.dot);
      this.packets.push(packet);
    }
    packet.isBusy = true;
    packet.dot.setAttribute("class", `packet ${kind}`);
    const way = packet.dot.animate(
      [
        { transform: `translate(${from.x}px, ${from.y}px)`, opacity: 0 },
        { opacity: 1, offset: 0.15 },
        { opacity: 1, offset: 0.85 },
        { transform: `translate(${to.x}px, ${to.y}px)`, opacity: 0 },
      ],
      { duration: 1100, delay: Math.random() * SPREAD_MS, easing: "ease-in-out", fill: "both" },
    );
    way.onfinish = way.oncancel = () => (packet.isBusy = false);
  }

  tell(learners, names, mood) {
    const counts = Object.create(null);
    for (const name of names) counts[learners[name].state] = (counts[learners[name].state] ?? 0) + 1;
    const told = Object.entries(counts).map(([state, n]) => `${n} ${state}`);
    this.svg.setAttribute("aria-label", names.length ? `${counted(names.length, "learner")}: ${told.join(", ")}` : "no learner yet");
    const isMoving = ["training", "closing"].includes(mood);
    const key = told.join() + isMoving;
    if (this.legend.dataset.key === key) return;
    this.legend.dataset.key = key;
    const rows = Object.entries(counts).map(([state, n]) => made("li", { class: `state ${state}` }, made("i"), `${n} ${state}`));
    if (isMoving)
      rows.push(
        made("li", { class: "way up" }, made("i"), "contribution"),
        made("li", { class: "way down" }, made("i"), "new version"),
      );
    this.legend.replaceChildren(...rows);
  }
}

class Island {
  constructor(name, layers) {
    this.name = name;
    this.line = drawn("line", { class: "way" });
    this.group = drawn("g", { class: "island", tabindex: "-1" });
    this.title = drawn("title");
    this.surf = drawn("path", { class: "surf" });
    this.rock = drawn("path", { class: "rock" });
    this.track = drawn("circle", { class: "track", pathLength: "100" });
    this.arc = drawn("circle", { class: "arc", pathLength: "100", transform: "rotate(-90)" });
    this.mark = drawn("text", { class: "mark", "text-anchor": "middle", dy: "0.36em" });
    this.label = drawn("text", { class: "label", "text-anchor": "middle" });
    this.detail = drawn("text", { class: "detail", "text-anchor": "middle" });
    this.group.append(this.title, this.surf, this.rock, this.track, this.arc, this.mark, this.label, this.detail);
    layers.lines.append(this.line);
    layers.islands.append(this.group);
    this.shape = rocky(name);
  }

  draw(centre, at, learner, share, count, speed) {
    this.at = at;
    const isSmall = count > LABELS_MAX;
    const shrink = isSmall && centre.x < 280 ? 0.65 : 1;
    const most = isSmall ? 10 : count > ROUND_MAX ? 18 : 34;
    const least = isSmall ? 4.5 : 11;
    const radius = shrink * Math.min(most, Math.max(least, (isSmall ? 7 : count > 8 ? 16 : 25) * Math.sqrt(share * count)));
    this.group.setAttribute("transform", `translate(${at.x} ${at.y})`);
    this.group.setAttribute("class", `island ${learner.state}${isSmall ? " small" : ""}`);
    this.line.setAttribute("class", `way ${learner.state}${isSmall ? " small" : ""}`);
    for (const [key, value] of Object.entries({ x1: centre.x, y1: centre.y, x2: at.x, y2: at.y })) this.line.setAttribute(key, value);
    this.rock.setAttribute("d", outline(this.shape, radius));
    this.surf.setAttribute("d", outline(this.shape, radius + (isSmall ? 1.5 : 4)));
    const ring = radius + (isSmall ? 4 * shrink : 9);
    for (const circle of [this.track, this.arc]) circle.setAttribute("r", ring);
    const isTraining = learner.state === "training";
    const isDone = ["finished", "stopped"].includes(learner.state);
    this.arc.setAttribute("stroke-dasharray", `${isTraining ? Math.round(100 * speed) : 0} 100`);
    put(this.mark, MARKS[learner.state] ?? "");
    this.mark.setAttribute("font-size", Math.max(9, radius));
    put(this.label, isSmall ? "" : cut(this.name));
    put(this.detail, isSmall ? "" : isTraining ? `${compact(learner.tokens_per_s)} tok/s · ${percent(share)}` : isDone ? percent(share) : learner.state);
    this.label.setAttribute("y", ring + 15);
    this.detail.setAttribute("y", ring + 30);
    const heard = learner.heard_s ? `, last heard of ${lasting(learner.heard_s)} ago` : "";
    const speedWords = isTraining ? `, ${compact(learner.tokens_per_s)} tokens/s` : "";
    put(this.title, `${this.name} ${stateWords(learner.state)}${speedWords}, ${percent(share, 1)} of the merged tokens${heard}`);
  }

  glow() {
    this.line.animate([{ strokeOpacity: 1 }, { strokeOpacity: 0.25 }], { duration: 800 });
  }

  remove() {
    this.line.remove();
    this.group.remove();
  }
}

function makeSyncer() {
  const group = drawn("g", { class: "syncer" });
  const label = drawn("text", { class: "label", "text-anchor": "middle", y: 40 });
  label.textContent = "syncer";
  group.append(
    drawn("circle", { class: "halo", r: 24 }),
    drawn("path", { class: "tower", d: "M-7 13 L-4 -9 L4 -9 L7 13 Z" }),
    drawn("rect", { class: "lamp", x: -5, y: -15, width: 10, height: 6, rx: 1.5 }),
    label,
  );
  return group;
}

// Around the syncer.
function ring(count, width, height) {
  const isNarrow = width < 560;
  const [x, y] = [width / 2, height / 2];
  const wide = Math.min(x - (isNarrow ? 58 : 110), 420);
  return Array.from({ length: count }, (_, index) => {
    const angle = (2 * Math.PI * (index + 0.5)) / count - Math.PI / 2;
    return { x: x + wide * Math.cos(angle), y: y - 14 + (y - (isNarrow ? 70 : 62)) * Math.sin(angle) };
  });
}

// In rows, every other one shifted by half an island, with room for the syncer in the middle.
function placed(count, width) {
  const cell = count <= LABELS_MAX ? CELL.few : width < 560 ? CELL.tiny : CELL.many;
  const columns = Math.max(2, Math.floor((width - cell.width / 2) / cell.width));
  for (let rows = Math.max(3, Math.ceil(count / columns)); ; rows++) {
    const height = rows * cell.height + 24;
    const middle = { x: width / 2, y: height / 2 };
    const spots = [];
    for (let row = 0; row < rows; row++)
      for (let column = 0; column < columns; column++) {
        const x = (width - (columns - 0.5) * cell.width) / 2 + (column + (row % 2 ? 0.75 : 0.25)) * cell.width;
        const y = 12 + (row + 0.5) * cell.height - (count > LABELS_MAX ? 0 : 14);
        const far = Math.hypot((x - middle.x) / 1.2, y - middle.y - 8);
        if (far > (count > LABELS_MAX ? 46 : 60)) spots.push({ x, y, far: Math.hypot(x - middle.x, (y - middle.y) * (width / height)) });
      }
    if (spots.length >= count) return { height, spots: innermost(spots, count) };
  }
}

// So many of them, in the order of rows.
function innermost(spots, count) {
  const within = [...spots].sort((a, b) => a.far - b.far).slice(0, count);
  return within.sort((a, b) => a.y - b.y || a.x - b.x);
}

// A rock's outline around a circle, the same for a name at every look.
function rocky(name) {
  let seed = 2166136261;
  for (const letter of name) seed = Math.imul(seed ^ letter.codePointAt(0), 16777619);
  return Array.from({ length: 9 }, () => {
    seed = Math.imul(seed ^ (seed >>> 15), 2246822519) + 374761393;
    return 0.86 + 0.28 * ((seed >>> 8) / 2 ** 24);
  });
}

function outline(shape, radius) {
  const points = shape.map((far, i) => {
    const angle = (2 * Math.PI * i) / shape.length;
    return [radius * far * Math.cos(angle), radius * far * Math.sin(angle)];
  });
  const middle = (a, b) => `${((a[0] + b[0]) / 2).toFixed(1)} ${((a[1] + b[1]) / 2).toFixed(1)}`;
  const parts = points.map((point, i) => {
    const next = points[(i + 1) % points.length];
    return `Q${point[0].toFixed(1)} ${point[1].toFixed(1)} ${middle(point, next)}`;
  });
  return `M${middle(points.at(-1), points[0])}${parts.join("")}Z`;
}

const cut = (name) => (name.length > 16 ? `${name.slice(0, 15)}…` : name);

function shuffled(list) {
  for (let i = list.length - 1; i > 0; i--) {
    const j = Math.floor(Math.random() * (i + 1));
    [list[i], list[j]] = [list[j], list[i]];
  }
  return list;
}
