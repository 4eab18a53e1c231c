// The alignment of a head of cross-attention: the source above, the target below, and between two tokens a line whose
// opacity is the square root of the weight, as is the colour of the map.

const FAINTEST = 1 / 255; // smaller weights have no line
const REACH = 6; // pixels around a line in which the pointer finds it
const EDGE = 8; // pixels between a token that is scrolled to and the edge

const alignment = byId("alignment");
const drawing = byId("lines");
const rows = { keys: byId("source"), queries: byId("target") };
const aligned = {};
let lines = [];
let linesAt = {}; // by axis and token

const isSingle = () => alignment.classList.contains("single");

// The lines of the selected token; without one, the weights of at least an even spread over the source.
const isVisible = (line) => (isSingle() ? line[shown.axis] === shown.token : line.isStrong);

const restingWords = "Point at a token or a line, or move along a row with the arrow keys.";

function makeAlignment() {
  for (const [axis, row] of Object.entries(rows)) {
    makeAxis(row, axis);
    for (const kind of ["pointerover", "focusin"]) row.addEventListener(kind, (event) => single(event.target));
    row.addEventListener("focusin", () => revealPartner(false));
    row.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      button.focus(); // which not every browser does
      revealPartner(true);
    });
  }
  // Only the lines of the selected token are shown while a row has the pointer or the focus.
  alignment.addEventListener("pointerleave", () => alignment.contains(document.activeElement) || all());
  alignment.addEventListener("focusout", (event) => alignment.contains(event.relatedTarget) || all());
  drawing.addEventListener("pointermove", pointAtLine);
  drawing.addEventListener("pointerdown", pointAtLine);
  drawing.addEventListener("pointerleave", leaveLine);
  new ResizeObserver(placeLines).observe(byId("pair"));
}

function single(target) {
  if (!target.closest("button")) return;
  alignment.classList.add("single");
  byId("aligned").textContent = byId("sentence").textContent;
}

function all() {
  alignment.classList.remove("single");
  byId("aligned").textContent = restingWords;
}

// Scroll to the token with the largest weight; if that is too far off, away from the selected one only when `isAsked`.
function revealPartner(isAsked) {
  const { axis, token } = shown;
  const { other, weights } = AXES[axis];
  const frame = byId("pair").parentElement;
  const [own, partner] = [aligned[axis][token], aligned[other][strongest(weights(token))[0]]];
  const together = [own, partner].map((button) => [button.offsetLeft, button.offsetLeft + button.offsetWidth]).flat();
  const fits = Math.max(...together) - Math.min(...together) <= frame.clientWidth;
  const [left, right] = fits ? [Math.min(...together), Math.max(...together)] : together.slice(2);
  if (!fits && !isAsked) return;
  if (left < frame.scrollLeft) frame.scrollLeft = left - EDGE;
  else if (right > frame.scrollLeft + frame.clientWidth) frame.scrollLeft = right - frame.clientWidth + EDGE;
}

// The rows of a pair; tokens have the place that the longer row needs.
function layOutAlignment() {
  const { kind } = shown.head;
  byId("pair").style.setProperty("--longest", Math.max(kind.queries.length, kind.keys.length));
  for (const [axis, row] of Object.entries(rows)) {
    aligned[axis] = fillAxis(row, axis);
    aligned[axis][0].tabIndex = 0;
    row.setAttribute("aria-label", `${capitalised(kind.nouns[axis])}s, aligned. Arrow keys move.`);
  }
  byId("even").textContent = `1 / ${kind.keys.length}`;
  all();
}

function drawLines() {
  lines = [];
  const { queries, keys } = shown.head.kind;
  const even = 1 / keys.length - 0.5 / LEVELS; // half a step below, since weights are rounded
  for (let query = 0; query < queries.length; query++) {
    for (let key = 0; key < keys.length; key++) {
      const value = weight(shown.head, query, key);
      if (value >= FAINTEST) lines.push({ queries: query, keys: key, value, isStrong: value >= even });
    }
  }
  lines.sort((a, b) => a.value - b.value); // the strongest above the others
  for (const line of lines) {
    line.node = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.node.setAttribute("stroke-opacity", Math.sqrt(line.value));
    line.node.classList.toggle("strong", line.isStrong);
  }
  linesAt = Object.fromEntries(["queries", "keys"].map((axis) => [axis, Map.groupBy(lines, (line) => line[axis])]));
  drawing.replaceChildren(...lines.map((line) => line.node));
  placeLines();
}

// Each line runs from the middle of its source token to the middle of its target token.
function placeLines() {
  if (!lines.length) return;
  const middle = (button) => button.offsetLeft + button.offsetWidth / 2;
  const places = { queries: aligned.queries.map(middle), keys: aligned.keys.map(middle) };
  const height = drawing.clientHeight;
  for (const line of lines) {
    line.from = places.keys[line.keys];
    line.to = places.queries[line.queries];
    for (const [name, value] of Object.entries({ x1: line.from, y1: 0, x2: line.to, y2: height })) {
      line.node.setAttribute(name, value);
    }
  }
}

// Mark the selected token, its lines, and the tokens that they lead to.
function alignToken(weights) {
  const { axis, token } = shown;
  for (const side of ["queries", "keys"]) markTokens(aligned[side], side, weights.map(Math.sqrt));
  keepStop(rows[axis], aligned[axis][token]);
  for (const node of drawing.querySelectorAll(".chosen")) node.classList.remove("chosen");
  for (const line of linesAt[axis].get(token) ?? []) line.node.classList.add("chosen");
  if (isSingle()) byId("aligned").textContent = byId("sentence").textContent;
}

// The strongest line at the pointer.
function pointAtLine(event) {
  const box = drawing.getBoundingClientRect();
  const share = (event.clientY - box.top) / box.height;
  const x = event.clientX - box.left;
  const near = ({ from, to }) =>
    (Math.abs(from + share * (to - from) - x) * box.height) / Math.hypot(box.height, to - from) <= REACH;
  const line = lines.findLast((one) => isVisible(one) && near(one));
  leaveLine();
  if (!line) return;
  line.node.classList.add("pointed");
  alignment.classList.add("at-line");
  point(line.queries, line.keys);
  byId("aligned").textContent = byId("cell").textContent;
}

function leaveLine() {
  drawing.querySelector(".pointed")?.classList.remove("pointed");
  alignment.classList.remove("at-line");
  if (document.activeElement !== cells) unpoint();
  byId("aligned").textContent = isSingle() ? byId("sentence").textContent : restingWords;
}
