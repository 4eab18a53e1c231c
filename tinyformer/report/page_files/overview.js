// Thumbnails of the heads of one kind of attention, ordered by layer or by a measure.

const ORDERS = {
  layers: "by layer and head",
  smallest: "smallest first",
  largest: "largest first",
};

const thumbnails = byId("thumbnails");
const measureChoice = byId("measure");
const orderChoice = byId("order");

const BLOCK = 240; // heads that are laid out together, only when they are near the window

// Draws maps when they come near the window; those of a group are watched when the group comes near.
const drawWhenSeen = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      drawWhenSeen.unobserve(target);
      if (target.dataset.head) drawMap(target.querySelector("canvas"), heads[target.dataset.head]);
      else for (const button of target.querySelectorAll(".thumbnail")) drawWhenSeen.observe(button);
    }
  },
  { rootMargin: "400px" },
);

function redrawThumbnails() {
  for (const group of thumbnails.children) drawWhenSeen.observe(group);
}

const notesOf = (head) => [head.label, head.ablated ? "ablated" : ""].filter(Boolean);

function makeThumbnail(head, index) {
  const canvas = element("span", { class: "frame" }, element("canvas", { "aria-hidden": "true", width: 1, height: 1 }));
  canvas.classList.toggle("ablated", head.ablated);
  const place = element("span", { class: "place" });
  place.append(element("span", {}, `layer ${head.layer}`), " ", element("span", {}, `head ${head.name}`));
  const button = element("button", { type: "button", class: "thumbnail", tabindex: -1, "data-head": index });
  button.append(canvas, place, " ", element("span", { class: "value" }));
  for (const note of [head.label, head.ablated ? "ablated" : ""]) {
    button.append(" ", element("span", { class: "note" }, note)); // not shown if it is empty
  }
  button.addEventListener("click", () => openHead(head));
  return button;
}

// The kind of attention that is shown.
let chosenKind = kinds.find((kind) => kind.isCross) ?? kinds[0];

const ofKind = (kind) => heads.filter((head) => head.kind === kind);

// The measures that some head of a kind has, as indices into all measures.
const measuresOf = (kind) => [...measures.keys()].filter((at) => ofKind(kind).some((head) => head.values[at] !== null));

const chosenMeasure = () => measures.findIndex(({ name }) => name === measureChoice.value);

// The heads in the chosen order; heads without a defined measure come last.
function ordered() {
  const measure = chosenMeasure();
  const sign = { smallest: 1, largest: -1 }[orderChoice.value];
  if (!sign || measure < 0) return ofKind(chosenKind);
  const value = (head) => head.values[measure] ?? sign * Infinity;
  return ofKind(chosenKind).sort((a, b) => (value(a) === value(b) ? 0 : sign * (value(a) - value(b))));
}

const byLayer = () => Map.groupBy(ofKind(chosenKind), (head) => head.layer);

function arrange() {
  const buttons = ordered().map((head) => head.button);
  const isSorted = orderChoice.value !== "layers" && chosenMeasure() >= 0;
  const block = (_, at) => element("div", { class: "block" }, ...buttons.slice(at * BLOCK, (at + 1) * BLOCK));
  const groups = isSorted
    ? Array.from({ length: Math.ceil(buttons.length / BLOCK) }, block)
    : [...byLayer()].map(([layer, row]) =>
        element("div", { class: "layer" }, element("h3", {}, `Layer ${layer}`), ...row.map((head) => head.button)),
      );
  thumbnails.replaceChildren(...groups);
  redrawThumbnails();
}

function showValues() {
  const measure = chosenMeasure();
  for (const control of document.querySelectorAll('[data-needs="measures"]')) control.hidden = measure < 0;
  byId("measure-description").textContent = measures[measure]?.description ?? "";
  if (film) drawCurves();
  if (measure < 0) return;
  const { name } = measures[measure];
  for (const head of ofKind(chosenKind)) {
    const value = shownValue(head.values[measure], measure);
    head.button.querySelector(".value").replaceChildren(element("span", { class: "unseen" }, `${name} `), value);
  }
}

// The button in the row above or below that is nearest to the same column.
function vertically(direction, at, buttons) {
  const box = (button) => button.getBoundingClientRect();
  const here = box(buttons[at]);
  const group = buttons[at].parentElement;
  const near = [group.previousElementSibling, group, group.nextElementSibling].flatMap((other) => [...(other?.children ?? [])]);
  const beyond = near.filter((other) => buttons.includes(other) && direction * (box(other).top - here.top) > 1);
  if (!beyond.length) return at;
  const row = direction > 0 ? beyond[0] : beyond.at(-1);
  const inRow = beyond.filter((other) => Math.abs(box(other).top - box(row).top) <= 1);
  const offset = (other) => Math.abs(box(other).left - here.left);
  return buttons.indexOf(inRow.reduce((best, other) => (offset(other) < offset(best) ? other : best)));
}

const MOVES = {
  ArrowLeft: (at) => at - 1,
  ArrowRight: (at) => at + 1,
  ArrowUp: (at, buttons) => vertically(-1, at, buttons),
  ArrowDown: (at, buttons) => vertically(1, at, buttons),
  Home: () => 0,
  End: () => Infinity,
};

function makeText(name, tokens) {
  const first = tokens.slice(0, 600); // more than the four lines that are shown have
  const text = element("p", { class: "text" }, ...first.flatMap((token) => [element("bdi", {}, token), ...lineEnd(token)]));
  text.classList.toggle("words", !hasSpaces(tokens));
  return name ? [element("h3", {}, name), text] : [text];
}

// The text, or the source and the target of a pair, as running text.
function makeTexts() {
  const cross = kinds.find((kind) => kind.isCross);
  const texts = cross ? { source: cross.keys, target: cross.queries } : { "": kinds[0].keys };
  byId("texts").append(...Object.entries(texts).flatMap(([name, tokens]) => makeText(name, tokens)));
  byId("texts").classList.toggle("pair", Boolean(cross));
}

function makeKinds() {
  byId("kinds").hidden = !isPair;
  for (const kind of kinds) {
    const input = element("input", { type: "radio", name: "kind", value: kind.name });
    input.addEventListener("change", () => {
      showKind(kind);
      byId("sorted").textContent = `${count(ofKind(kind).length, "head")} of ${kind.name} attention.`;
    });
    kind.input = input;
    byId("kinds").append(element("label", {}, input, element("span", {}, kind.name)));
  }
}

// Show the heads of a kind, with the measures that they have.
function showKind(kind) {
  chosenKind = kind;
  kind.input.checked = true;
  const before = measureChoice.value;
  const names = measuresOf(kind).map((at) => measures[at].name);
  measureChoice.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (names.includes(before)) measureChoice.value = before;
  const columns = Math.max(...[...byLayer().values()].map((row) => row.length));
  thumbnails.style.setProperty("--columns", columns);
  // Maps of very different sides are drawn with cells that are not square.
  const aspect = kind.keys.length / kind.queries.length;
  thumbnails.style.setProperty("--aspect", Math.max(0.5, Math.min(aspect, 2)));
  thumbnails.classList.toggle("fine", Math.max(kind.queries.length, kind.keys.length) > 128);
  thumbnails.classList.toggle("many", ofKind(kind).length > BLOCK);
  listChoices();
  redrawScatter();
  showValues();
  arrange();
}

function makeOverview() {
  makeTexts();
  makeKinds();
  heads.forEach((head, index) => (head.button = makeThumbnail(head, index)));
  makeScatter();
  for (const kind of kinds) ofKind(kind)[0].button.tabIndex = 0;
  for (const [value, words] of Object.entries(ORDERS)) orderChoice.append(element("option", { value }, words));
  rove(thumbnails, (key, at, buttons) => MOVES[key]?.(at, buttons));
  for (const control of [measureChoice, orderChoice]) {
    control.addEventListener("change", () => {
      showValues();
      arrange();
      const measure = orderChoice.value === "layers" ? "" : `${measureChoice.value}, `;
      byId("sorted").textContent = `Heads in order: ${measure}${ORDERS[orderChoice.value]}.`;
    });
  }
  showKind(chosenKind);
}
