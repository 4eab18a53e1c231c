// One head: its map with tokens on both axes, the weights of the selected token, and the measures.

const STRONGEST = 8;
const MOST_ROWS = 512; // of the table
const MIN_CELL = 11;
const MAX_CELL = 44;

const shown = { head: null, other: null, axis: "queries", token: 0, query: 0, key: 0, all: false, from: { queries: 0, keys: 0 } };

// The words of each axis, and the weights of one of its tokens over the tokens of the other axis.
const AXES = {
  queries: {
    other: "keys",
    label: "Queries: the tokens that a token attends to",
    verb: "attends to",
    weights: (query, head = shown.head) => head.kind.keys.map((_, key) => weight(head, query, key)),
  },
  keys: {
    other: "queries",
    label: "Keys: the tokens that attend to a token",
    verb: "is attended to by",
    weights: (key, head = shown.head) => head.kind.queries.map((_, query) => weight(head, query, key)),
  },
};

const cells = byId("cells");
const cursors = document.querySelectorAll(".cursor");
const labels = {};
let strip = [];

// The views of a head; cross-attention opens with both, since its alignment is read first.
const VIEWS = { map: "map", lines: "lines", both: "map and lines" };
let chosenView = null;

// The name of a token, as in "source token 3 ‘a’".
function tokenName(axis, index) {
  const { kind } = shown.head;
  return `${kind.nouns[axis]} ${shownToken(kind[axis], index)}`;
}

const axisWords = (axis) =>
  shown.head.kind.isCross ? `${capitalised(shown.head.kind.nouns[axis])}s` : AXES[axis].label;

// A row or column of buttons, one for each token of an axis.
function fillAxis(container, axis) {
  const { from, size } = partOf(axis);
  const buttons = shown.head.kind[axis].slice(from, from + size).map((token, index) => {
    const attributes = { type: "button", class: "token", tabindex: -1, "data-token": from + index };
    const name = tokenName(axis, from + index);
    const button = element("button", { ...attributes, "aria-label": name, title: name });
    button.append(element("span", {}, token));
    return button;
  });
  container.replaceChildren(...buttons);
  return buttons;
}

function makeAxis(container, axis) {
  const choose = (event) => {
    const button = event.target.closest("button");
    // In an alignment, a token with the focus stays selected, so that its row can be scrolled.
    const isHeld = event.type === "pointerover" && [container, document.activeElement].every((one) => alignment.contains(one));
    if (button && !isHeld) select(axis, Number(button.dataset.token));
  };
  for (const kind of ["pointerover", "focusin", "click"]) container.addEventListener(kind, choose);
  rove(container, alongTokens);
}

function select(axis, token) {
  Object.assign(shown, { axis, token });
  showToken();
}

// Mark the selected token on its axis, and give those of the other axis the weights by which they are drawn.
function markTokens(buttons, side, lengths) {
  buttons.forEach((button, index) => {
    const token = shown.from[side] + index;
    button.style.setProperty("--weight", side === shown.axis ? 0 : lengths[token]);
    if (side === shown.axis && token === shown.token) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  });
}

function showToken() {
  const { axis, token } = shown;
  const { verb, other, weights: of } = AXES[axis];
  const { sides } = shown.head.kind;
  const weights = of(token);
  const largest = Math.max(...weights) || 1;
  const lengths = weights.map((value) => value / largest);
  for (const side of ["queries", "keys"]) markTokens(labels[side], side, lengths);
  keepStop(byId(axis), labels[axis][token - shown.from[axis]]);
  for (const band of document.querySelectorAll(".band")) {
    band.className = `band ${axis}`;
    band.style.setProperty("--at", token - shown.from[axis]);
  }
  strip.forEach((part, at) => {
    const index = shown.from.keys + at;
    part.style.setProperty("--weight", Math.sqrt(weights[index]));
    part.classList.toggle("chosen", index === token);
  });
  const order = strongest(weights);
  const title = `${capitalised(tokenName(axis, token))} ${verb}`;
  const first = order.slice(0, 3).filter((index) => weights[index] > 0);
  const words = first.map((index) => `${tokenName(other, index)} ${shownWeight(weights[index])}`);
  byId("token-title").textContent = title;
  byId("sentence").textContent = `${title}: ${words.join(", ") || "no token"}.`;
  byId("weights-of").textContent = sides[other];
  byId("weights-caption").textContent = `${title}, the largest weight first`;
  // Tokens that the mask hides have no weight, and no row.
  const seen = order.filter((index) => weights[index] > 0);
  const most = seen.length > MOST_ROWS ? `the ${MOST_ROWS} largest` : `all ${seen.length}`;
  byId("all-weights").textContent = `Show ${shown.all ? `the ${STRONGEST} largest` : most}`;
  byId("all-weights").hidden = seen.length <= STRONGEST;
  const rows = seen.slice(0, shown.all ? MOST_ROWS : STRONGEST);
  const others = shown.other && of(token, shown.other);
  const none = [element("tr", {}, element("td", { class: "muted" }, "all weights are 0"))];
  const weightRows = rows.map((index) => weightRow(other, index, weights[index], lengths[index], others?.[index]));
  byId("weights").replaceChildren(...(seen.length ? weightRows : none));
  alignToken(weights);
}

function weightRow(axis, index, value, length, otherValue) {
  const bar = element("td", { class: "bar" });
  bar.style.setProperty("--weight", length);
  const token = element("bdi", {}, shown.head.kind[axis][index]);
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, element("span", { class: "index" }, index), " ", token),
    element("td", { class: "number" }, shownWeight(value)),
    bar,
    ...otherCell(shownWeight(otherValue ?? 0)),
  );
}

// Show a single weight, selected by the pointer or the arrow keys.
function point(query, key) {
  Object.assign(shown, { query, key });
  for (const cursor of cursors) {
    cursor.hidden = false;
    cursor.style.setProperty("--query", query - shown.from.queries);
    cursor.style.setProperty("--key", key - shown.from.keys);
  }
  const { sides, queries, keys } = shown.head.kind;
  const values = drawnHeads().map((head) => element("strong", {}, shownWeight(weight(head, query, key))));
  byId("cell").replaceChildren(
    `${sides.queries} ${shownToken(queries, query)} → ${sides.keys} ${shownToken(keys, key)}: `,
    ...(shown.other ? [values[0], `, ${shown.other.title}: `, values[1]] : values),
  );
}

function unpoint() {
  for (const cursor of cursors) cursor.hidden = true;
  byId("cell").textContent = "Point at the map to see a single weight.";
}

function makeCells() {
  const place = (event) => {
    const [across, down] = sharesOf(event, event.currentTarget.getBoundingClientRect());
    const step = (axis, share) => within(axis, shown.from[axis] + Math.floor(share * partOf(axis).size));
    return [step("queries", down), step("keys", across)];
  };
  const follow = (event) => {
    const [query, key] = place(event);
    if (cursors[0].hidden || query !== shown.query || key !== shown.key) point(query, key);
  };
  for (const area of document.querySelectorAll(".cells")) {
    area.addEventListener("pointermove", follow);
    area.addEventListener("pointerdown", follow);
    area.addEventListener("click", (event) => select("queries", place(event)[0]));
    area.addEventListener("pointerleave", () => document.activeElement === cells || unpoint());
  }
  cells.addEventListener("blur", unpoint);
  cells.addEventListener("focus", () => point(shown.query, shown.key));
  const isStep = (event) => event.key in WAYS && !hasModifier(event);
  cells.addEventListener("keydown", (event) => {
    if (!isStep(event)) return;
    event.preventDefault();
    const [right, down] = WAYS[event.key];
    point(within("queries", shown.query + down), within("keys", shown.key + right));
    cursors[0].scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  // A head that was opened has the focus on its title; from there, the arrow keys lead into the map or the lines.
  byId("head-title").addEventListener("keydown", (event) => {
    if (!isStep(event)) return;
    event.preventDefault();
    const entry = alignment.hidden || (view() === "both" && !shown.head.kind.isCross) ? cells : rows.queries.querySelector('[tabindex="0"]');
    entry.focus();
    entry.dispatchEvent(new KeyboardEvent("keydown", { key: event.key, bubbles: true, cancelable: true }));
  });
}

function makeHeadView() {
  for (const axis of ["queries", "keys"]) makeAxis(byId(axis), axis);
  makeCells();
  makeLines();
  makeParts();
  makeComparison();
  makeViews();
  byId("strip").addEventListener("pointerover", (event) => {
    const index = event.target.dataset.token;
    if (index !== undefined) select(shown.axis, Number(index));
  });
  const all = byId("all-weights");
  all.addEventListener("click", () => {
    shown.all = !shown.all;
    showToken();
  });
  new ResizeObserver(fit).observe(document.querySelector(".map-side"));
  addEventListener("resize", fit);
}

// Lay out the tokens of a kind of attention, with its last query selected.
function layOut(kind) {
  const last = partOf("queries").size - 1;
  Object.assign(shown, { from: { queries: 0, keys: 0 }, axis: "queries", token: last, query: last, key: 0 });
  layOutPart();
  listOthers(kind);
}

function layOutPart() {
  const { kind } = shown.head;
  Object.assign(shown, { token: within(shown.axis, shown.token), query: within("queries", shown.query), key: within("keys", shown.key) });
  const map = document.querySelector(".map");
  map.style.setProperty("--rows", partOf("queries").size);
  map.style.setProperty("--columns", partOf("keys").size);
  for (const axis of ["queries", "keys"]) {
    const container = byId(axis);
    labels[axis] = fillAxis(container, axis);
    labels[axis].at(-1).tabIndex = 0;
    container.classList.toggle("upright", Math.max(...kind[axis].map((token) => [...token].length)) <= 2);
    container.setAttribute("aria-label", `${axisWords(axis)}. Arrow keys move.`);
  }
  byId("across").textContent = `${kind.isCross ? kind.sides.keys : "keys"}\u00a0→`;
  byId("down").textContent = `${kind.isCross ? kind.sides.queries : "queries"}\u00a0↓`;
  for (const part of ["strip", "strip-scale"]) byId(part).hidden = kind.isCross;
  const { from, size } = partOf("keys");
  const tokens = kind.isCross ? [] : kind.keys.slice(from, from + size);
  strip = tokens.map((token, index) => element("bdi", { "data-token": from + index }, token));
  byId("strip").classList.toggle("words", !hasSpaces(kind.keys));
  byId("strip").replaceChildren(...strip.flatMap((part, index) => [part, ...lineEnd(tokens[index])]));
  layOutLines();
}

const view = () => chosenView ?? (shown.head.kind.isCross ? "both" : "map");

function makeViews() {
  for (const [value, words] of Object.entries(VIEWS)) {
    const input = element("input", { type: "radio", name: "view", value });
    input.addEventListener("change", () => {
      chosenView = value;
      showView();
    });
    byId("views").append(element("label", {}, input, element("span", {}, words)));
  }
}

function showView() {
  document.querySelector(`#views input[value="${view()}"]`).checked = true;
  alignment.hidden = view() === "map";
  document.querySelector(".map-side").hidden = view() === "lines";
  fit();
  drawLines();
}

// Cells of whole pixels, so that all have the same size: as large as the window allows, but large enough for labels.
function fit() {
  if (!shown.head) return;
  const [queries, keys] = [partOf("queries").size, partOf("keys").size];
  const map = document.querySelector(".map");
  const numMaps = drawnHeads().length;
  const width = (document.querySelector(".map-side").clientWidth - byId("queries").offsetWidth) / numMaps - 12 * (numMaps - 1);
  const height = innerHeight * 0.86 - byId("keys").offsetHeight;
  const cell = Math.floor(Math.min(width / keys, height / queries));
  map.style.setProperty("--cell", `${Math.max(MIN_CELL, Math.min(cell, MAX_CELL))}px`);
  byId("scrolls").hidden = map.scrollWidth <= map.parentElement.clientWidth + 1;
}

function showHead(head) {
  const before = shown.head?.kind;
  shown.head = head;
  if (head.kind !== before) layOut(head.kind);
  byId("head-title").textContent = capitalised(head.title);
  const notes = [head.label, head.ablated ? "ablated: its output is replaced" : ""].filter(Boolean);
  byId("head-notes").textContent = notes.join("; ");
  byId("head-notes").hidden = !notes.length;
  cells.classList.toggle("ablated", head.ablated);
  showParts(head);
  drawMap(byId("map"), head, partOf("queries"), partOf("keys"));
  showOther();
  showView();
  showToken();
  if (cursors[0].hidden) unpoint();
  else point(shown.query, shown.key);
  showMeasures(head);
}

// The rows of the table by measure; the headings stay, since a film changes the numbers at each of its snapshots.
const measureRows = [];

function showMeasures(head) {
  const rows = measuresOf(head.kind).map((at) => {
    const value = head.values[at];
    const defined = ofKind(head.kind)
      .map((other) => other.values[at])
      .filter((other) => other !== null);
    const rank = 1 + defined.filter((other) => other > value).length;
    const { name, description } = measures[at];
    const heading = () => element("th", { scope: "row" }, name, element("span", { class: "description" }, description));
    const row = (measureRows[at] ??= element("tr", {}, heading()));
    while (row.children.length > 1) row.lastChild.remove();
    row.append(
      element("td", { class: "number" }, shownValue(value, at), ...growth(head, at)),
      element("td", { class: "number" }, value === null ? "–" : `${rank} of ${defined.length}`),
      ...otherCell(shownValue(shown.other?.values[at] ?? null, at)),
    );
    return row;
  });
  byId("measures-side").hidden = !rows.length;
  const table = byId("measures");
  if (table.children.length > rows.length || rows.some((row, index) => row !== table.children[index])) table.replaceChildren(...rows);
}
