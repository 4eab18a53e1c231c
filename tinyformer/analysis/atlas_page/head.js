// One head: its map with tokens on both axes, and the weights of the selected token.

const STRONGEST = 8;
const MIN_CELL = 11;
const MAX_CELL = 44;

const shown = { head: heads[0], axis: "queries", token: size - 1, query: size - 1, key: 0, all: false };

// The words of each axis, and the weights of one of its tokens over the tokens of the other axis.
const AXES = {
  queries: {
    verb: "attends to",
    others: "key",
    weights: (token) => Array.from({ length: size }, (_, key) => weight(shown.head, token, key)),
  },
  keys: {
    verb: "is attended to by",
    others: "query",
    weights: (token) => Array.from({ length: size }, (_, query) => weight(shown.head, query, token)),
  },
};
const OTHER = { queries: "keys", keys: "queries" };

const cells = byId("cells");
const cursor = byId("cursor");
const labels = {};
let strip = [];

function makeAxis(axis) {
  const container = byId(axis);
  labels[axis] = tokens.map((token, index) => {
    const attributes = { type: "button", class: "token", tabindex: -1, "data-token": index };
    const name = `token ${shownToken(index)}`;
    const button = element("button", { ...attributes, "aria-label": name, title: name });
    button.append(element("span", {}, token));
    return button;
  });
  container.append(...labels[axis]);
  labels[axis][shown.token].tabIndex = 0;
  const choose = (event) => {
    const button = event.target.closest("button");
    if (button) select(axis, Number(button.dataset.token));
  };
  for (const kind of ["pointerover", "focusin", "click"]) container.addEventListener(kind, choose);
  const steps = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  rove(container, (key, at) => (key in steps ? at + steps[key] : undefined));
  container.classList.toggle("upright", Math.max(...tokens.map((token) => [...token].length)) <= 2);
}

function select(axis, token) {
  Object.assign(shown, { axis, token });
  showToken();
}

function showToken() {
  const { axis, token } = shown;
  const { verb, others, weights: of } = AXES[axis];
  const weights = of(token);
  const largest = Math.max(...weights) || 1;
  const lengths = weights.map((value) => value / largest);
  for (const side of ["queries", "keys"]) {
    labels[side].forEach((label, index) => {
      label.style.setProperty("--weight", side === axis ? 0 : lengths[index]);
      if (side === axis && index === token) label.setAttribute("aria-current", "true");
      else label.removeAttribute("aria-current");
    });
  }
  keepStop(byId(axis), labels[axis][token]);
  byId("band").className = axis;
  byId("band").style.setProperty("--at", token);
  strip.forEach((part, index) => {
    part.style.setProperty("--weight", lengths[index]);
    part.classList.toggle("chosen", index === token);
  });
  const order = strongest(weights);
  const title = `Token ${shownToken(token)} ${verb}`;
  const first = order.slice(0, 3).filter((index) => weights[index] > 0);
  const words = first.map((index) => `token ${shownToken(index)} ${shownWeight(weights[index])}`);
  byId("token-title").textContent = title;
  byId("sentence").textContent = `${title}: ${words.join(", ") || "no token"}.`;
  byId("weights-of").textContent = others;
  byId("weights-caption").textContent = `${title}, the largest weight first`;
  const rows = shown.all ? order : order.slice(0, STRONGEST).filter((index) => weights[index] > 0);
  byId("weights").replaceChildren(...rows.map((index) => weightRow(index, weights[index], lengths[index])));
}

function weightRow(index, value, length) {
  const bar = element("td", { class: "bar" });
  bar.style.setProperty("--weight", length);
  const token = element("bdi", {}, tokens[index]);
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, element("span", { class: "index" }, index), " ", token),
    element("td", { class: "number" }, shownWeight(value)),
    bar,
  );
}

// Show a single weight, selected by the pointer or the arrow keys.
function point(query, key) {
  Object.assign(shown, { query, key });
  cursor.hidden = false;
  cursor.style.setProperty("--query", query);
  cursor.style.setProperty("--key", key);
  const value = shownWeight(weight(shown.head, query, key));
  byId("cell").replaceChildren(
    `query ${shownToken(query)} → key ${shownToken(key)}: `,
    element("strong", {}, value),
  );
}

function unpoint() {
  cursor.hidden = true;
  byId("cell").textContent = "Point at the map to see a single weight.";
}

function makeCells() {
  const place = (event) => {
    const box = byId("map").getBoundingClientRect();
    const step = (offset) => Math.max(0, Math.min(size - 1, Math.floor((offset / box.width) * size)));
    return [step(event.clientY - box.top), step(event.clientX - box.left)];
  };
  const follow = (event) => {
    const [query, key] = place(event);
    if (cursor.hidden || query !== shown.query || key !== shown.key) point(query, key);
  };
  cells.addEventListener("pointermove", follow);
  cells.addEventListener("pointerdown", follow);
  cells.addEventListener("click", (event) => select("queries", place(event)[0]));
  cells.addEventListener("pointerleave", () => document.activeElement === cells || unpoint());
  cells.addEventListener("blur", unpoint);
  cells.addEventListener("focus", () => point(shown.query, shown.key));
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  cells.addEventListener("keydown", (event) => {
    if (!(event.key in steps) || event.shiftKey || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const [down, right] = steps[event.key];
    const within = (value) => Math.max(0, Math.min(size - 1, value));
    point(within(shown.query + down), within(shown.key + right));
    cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}

function makeHeadView() {
  document.querySelector(".map").style.setProperty("--size", size);
  makeAxis("queries");
  makeAxis("keys");
  makeCells();
  strip = tokens.map((token, index) => element("bdi", { "data-token": index }, token));
  byId("strip").append(...strip.flatMap((part, index) => [part, ...lineEnd(tokens[index])]));
  byId("strip").addEventListener("pointerover", (event) => {
    const index = event.target.dataset.token;
    if (index !== undefined) select(shown.axis, Number(index));
  });
  const all = byId("all-weights");
  all.textContent = `Show all ${size}`;
  all.hidden = size <= STRONGEST;
  all.addEventListener("click", () => {
    shown.all = !shown.all;
    all.setAttribute("aria-pressed", shown.all);
    showToken();
  });
  byId("measures-side").hidden = !measures.length;
  new ResizeObserver(fit).observe(document.querySelector(".map-side"));
  addEventListener("resize", fit);
}

// Cells of whole pixels, so that all have the same size: as large as the window allows, but large enough for labels.
function fit() {
  const map = document.querySelector(".map");
  const width = document.querySelector(".map-side").clientWidth - byId("queries").offsetWidth;
  const height = innerHeight * 0.86 - byId("keys").offsetHeight;
  const cell = Math.floor(Math.min(width, height) / size);
  map.style.setProperty("--cell", `${Math.max(MIN_CELL, Math.min(cell, MAX_CELL))}px`);
}

function showHead(head) {
  shown.head = head;
  byId("head-title").textContent = `Layer ${head.layer} head ${head.name}`;
  drawMap(byId("map"), head);
  showToken();
  if (cursor.hidden) unpoint();
  else point(shown.query, shown.key);
  const rows = measures.map(({ name, description }, index) => {
    const value = head.values[index];
    const defined = heads.map((other) => other.values[index]).filter((other) => other !== null);
    const rank = 1 + defined.filter((other) => other > value).length;
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, name, element("span", { class: "description" }, description)),
      element("td", { class: "number" }, shownNumber(value)),
      element("td", { class: "number" }, value === null ? "–" : `${rank} of ${defined.length}`),
    );
  });
  byId("measures").replaceChildren(...rows);
}
