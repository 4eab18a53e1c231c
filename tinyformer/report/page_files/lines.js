// The lines of a head: its tokens twice, and between two tokens a line whose opacity is the square root of the weight, as
// is the colour of the map. In cross-attention, the source stands above the target; otherwise, queries stand on the left
// and keys on the right, as in the head view of BertViz (Vig 2019, arXiv 1906.05714).

const FAINTEST = 1 / 255; // smaller weights have no line
const MOST = 4000; // lines while no token is selected, the strongest ones
const REACH = 6; // pixels around a line in which the pointer finds it
const EDGE = 8; // pixels between a token that is scrolled to and the edge

const alignment = byId("alignment");
const drawing = byId("lines");
const rows = { keys: byId("source"), queries: byId("target") };
const aligned = {};
let lines = [];

const isSingle = () => alignment.classList.contains("single");

const restingWords = "Point at a token or a line, or move along the tokens with the arrow keys.";

function makeLines() {
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
  drawLines();
  byId("aligned").textContent = byId("sentence").textContent;
}

function all() {
  if (!isSingle()) return;
  alignment.classList.remove("single");
  drawLines();
  byId("aligned").textContent = restingWords;
}

// Scroll to the token with the largest weight; if both do not fit, leave the selected one only when `isAsked`.
function revealPartner(isAsked) {
  if (!shown.head.kind.isCross) return; // the columns of one text scroll with the page
  const { axis, token } = shown;
  const { other, weights } = AXES[axis];
  const frame = byId("pair").parentElement;
  const at = (side, index) => aligned[side][index - shown.from[side]];
  const [own, partner] = [at(axis, token), at(other, strongest(weights(token))[0])];
  if (!partner) return; // in another part of a long text
  const together = [own, partner].map((button) => [button.offsetLeft, button.offsetLeft + button.offsetWidth]).flat();
  const fits = Math.max(...together) - Math.min(...together) <= frame.clientWidth;
  const [left, right] = fits ? [Math.min(...together), Math.max(...together)] : together.slice(2);
  if (!fits && !isAsked) return;
  if (left < frame.scrollLeft) frame.scrollLeft = left - EDGE;
  else if (right > frame.scrollLeft + frame.clientWidth) frame.scrollLeft = right - frame.clientWidth + EDGE;
}

// The tokens of a kind; in rows, they have the place that the longer one needs.
function layOutLines() {
  const { kind } = shown.head;
  const pair = byId("pair");
  alignment.classList.toggle("columns", !kind.isCross);
  pair.style.setProperty("--longest", Math.max(partOf("queries").size, partOf("keys").size));
  const order = kind.isCross ? ["keys", "queries"] : ["queries", "keys"];
  pair.replaceChildren(rows[order[0]], drawing, rows[order[1]]);
  for (const [axis, row] of Object.entries(rows)) {
    aligned[axis] = fillAxis(row, axis);
    aligned[axis][0].tabIndex = 0;
    row.setAttribute("aria-label", `${axisWords(axis)}, with lines. Arrow keys move.`);
  }
  byId("alignment-title").textContent = kind.isCross ? "Alignment" : "Lines between tokens";
  byId("sides").textContent = kind.isCross
    ? "Source above, target below."
    : "Queries on the left, the keys that they attend to on the right.";
  byId("even").textContent = `weights of at least 1 / ${kind.keys.length}, an even spread over the ${kind.isCross ? "source" : "text"}`;
  byId("aligned").textContent = restingWords;
  alignment.classList.remove("single");
}

// The lines of the selected token; without one, the weights of at least an even spread over the keys.
function linesOf(head) {
  const [queries, keys] = [partOf("queries"), partOf("keys")];
  const even = 1 / head.kind.keys.length - 0.5 / LEVELS; // half a step below, since weights are rounded
  const [least, axis, token] = isSingle() ? [FAINTEST, shown.axis, shown.token] : [even];
  const found = [];
  for (let query = queries.from; query < queries.from + queries.size; query++) {
    if (axis === "queries" && query !== token) continue;
    for (let key = keys.from; key < keys.from + keys.size; key++) {
      if (axis === "keys" && key !== token) continue;
      const value = weight(head, query, key);
      if (value >= least) found.push({ head, queries: query, keys: key, value });
    }
  }
  return found;
}

function drawLines() {
  if (alignment.hidden) return;
  const found = drawnHeads().flatMap(linesOf);
  lines = found.sort((a, b) => a.value - b.value).slice(-MOST); // the strongest above the others
  for (const line of lines) {
    line.node = shape("line", { "stroke-opacity": Math.sqrt(line.value) });
    line.node.classList.toggle("other", line.head !== shown.head);
  }
  drawing.classList.toggle("ablated", drawnHeads().every((head) => head.ablated));
  drawing.replaceChildren(...lines.map((line) => line.node));
  byId("line-colours").hidden = !shown.other;
  const [own, other] = drawnHeads();
  if (other) {
    const sample = (head, kind) => [element("span", { class: `sample ${kind}` }), ` ${head.title}`];
    byId("line-colours").replaceChildren("Lines: ", ...sample(own, "own"), ", ", ...sample(other, "other"), ".");
  }
  placeLines();
}

// Each line joins the middles of the sides of its tokens.
function placeLines() {
  if (!lines.length) return;
  const { isCross } = shown.head.kind;
  const middle = (button) =>
    isCross ? button.offsetLeft + button.offsetWidth / 2 : button.offsetTop + button.offsetHeight / 2;
  const places = { queries: aligned.queries.map(middle), keys: aligned.keys.map(middle) };
  const [width, height] = [drawing.clientWidth, drawing.clientHeight];
  for (const line of lines) {
    const [query, key] = ["queries", "keys"].map((axis) => places[axis][line[axis] - shown.from[axis]]);
    line.ends = isCross ? { x1: key, y1: 0, x2: query, y2: height } : { x1: 0, y1: query, x2: width, y2: key };
    for (const [name, value] of Object.entries(line.ends)) line.node.setAttribute(name, value);
  }
}

// Mark the selected token, its lines, and the tokens that they lead to.
function alignToken(weights) {
  const { axis, token } = shown;
  for (const side of ["queries", "keys"]) markTokens(aligned[side], side, weights.map(Math.sqrt));
  keepStop(rows[axis], aligned[axis][token - shown.from[axis]]);
  if (!isSingle()) return;
  drawLines();
  byId("aligned").textContent = byId("sentence").textContent;
}

// The strongest line at the pointer.
function pointAtLine(event) {
  const box = drawing.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const near = ({ ends: { x1, y1, x2, y2 } }) => {
    const [across, down] = [x2 - x1, y2 - y1];
    return Math.abs(across * (y - y1) - down * (x - x1)) / Math.hypot(across, down) <= REACH;
  };
  const line = lines.findLast(near);
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
