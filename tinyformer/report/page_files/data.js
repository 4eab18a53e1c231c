// The data of the file, and how numbers, tokens and colours are shown.

const atlas = JSON.parse(document.getElementById("atlas-data").textContent);
const { measures } = atlas;
const LEVELS = 65535;

// In cross-attention, a row is a token of the target and a column one of the source.
const CROSS = "cross";
const SIDES = { queries: "query", keys: "key" };
const SIDES_OF_PAIR = { queries: "target", keys: "source" };

// The kinds of attention, a single one in a model of one text: {name, queries, keys} with the tokens of both axes, the
// names of the axes, and the words for a token.
const kinds = atlas.kinds.map((kind) => {
  const isCross = kind.name === CROSS;
  const sides = isCross ? SIDES_OF_PAIR : SIDES;
  const nouns = isCross ? { queries: "target token", keys: "source token" } : { queries: "token", keys: "token" };
  return { ...kind, isCross, sides, nouns };
});
const isPair = kinds.length > 1;

// In the order of layers: {kind, layer, name, label, ablated, values, weights}, a title and a fragment identifier.
const heads = atlas.heads.map((head) => {
  const kind = kinds[head.kind];
  const place = `layer ${head.layer} head ${head.name}`;
  const fragment = [kind.name, "layer", head.layer, "head", encodeURIComponent(head.name)].filter((part) => part !== "");
  return { ...head, kind, title: `${kind.name} ${place}`.trim(), hash: `#${fragment.join("-")}` };
});

// Some bytes of base64, in which four characters are three bytes.
function decoded(base64, from = 0, size = Infinity) {
  const text = atob(base64.slice(4 * Math.floor(from / 3), 4 * Math.ceil((from + size) / 3)));
  const skipped = from % 3;
  const bytes = new Uint8Array(Math.min(size, text.length - skipped));
  for (let at = 0; at < bytes.length; at++) bytes[at] = text.charCodeAt(at + skipped);
  return bytes;
}

// The levels of the 8 bits that a film has, see film.js.
const SQUARES = Array.from({ length: 256 }, (_, root) => Math.round((root / 255) ** 2 * LEVELS));

// A map's levels, row by row, decoded on first use. All machines that run browsers are little-endian.
function levels(head) {
  if (typeof head.weights === "string") {
    const bytes = decoded(head.weights);
    head.weights = head.isQuantised ? new Uint16Array(bytes).map((root) => SQUARES[root]) : new Uint16Array(bytes.buffer);
  }
  return head.weights;
}

// The levels of some weights in a row. Of a map with more than LARGE weights, only these are decoded, each time anew.
const LARGE = 2 ** 21;
function levelsOf(head, query, key = 0, number = head.kind.keys.length) {
  const { queries, keys } = head.kind;
  const at = query * keys.length + key;
  if (head.film || queries.length * keys.length <= LARGE) return levels(head).subarray(at, at + number);
  return new Uint16Array(decoded(head.weights, 2 * at, 2 * number).buffer);
}

// Whether the weights on the first key, often an attention sink, are left out.
let hidesFirst = false;
const LEAST = 0.001; // rows whose other weights sum to less are left out as well, since these are rounding errors

// The factor by which the other weights of a query are multiplied, so that its row keeps its sum without the first key.
function factor(head, query) {
  if (!hidesFirst) return 1;
  head.factors ??= [];
  if (query in head.factors) return head.factors[query];
  const row = levelsOf(head, query);
  const rest = row.subarray(1).reduce((sum, level) => sum + level, 0);
  return (head.factors[query] = rest >= LEAST * LEVELS ? (rest + row[0]) / rest : 0);
}

function weight(head, query, key) {
  if (hidesFirst && key === 0) return 0;
  return (levelsOf(head, query, key, 1)[0] / LEVELS) * factor(head, query);
}

// The colours of 256 steps of the square root, as ABGR pixels.
const pixels = Uint32Array.from(atlas.colours, (colour) => {
  const rgb = parseInt(colour.slice(1), 16);
  return 0xff000000 | ((rgb & 0xff) << 16) | (rgb & 0xff00) | (rgb >> 16);
});

const strideOf = (size) => Math.ceil(size / 512); // the number of tokens that a pixel stands for

// Draw the weights of some queries and keys; where a pixel stands for n tokens, the largest of n keys at every n-th query.
function drawMap(canvas, head, queries = { from: 0, size: head.kind.queries.length }, keys = { from: 0, size: head.kind.keys.length }) {
  const [down, across] = [strideOf(queries.size), strideOf(keys.size)];
  const columns = (canvas.width = Math.ceil(keys.size / across));
  canvas.height = Math.ceil(queries.size / down);
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, canvas.height);
  const colours = new Uint32Array(image.data.buffer);
  for (let y = 0; y < canvas.height; y++) {
    const query = queries.from + y * down;
    const row = levelsOf(head, query, keys.from, keys.size);
    const scale = factor(head, query) / LEVELS;
    for (let x = 0; x < columns; x++) {
      let level = 0;
      for (let key = x * across; key < Math.min((x + 1) * across, keys.size); key++) {
        if (row[key] > level && !(hidesFirst && keys.from + key === 0)) level = row[key];
      }
      colours[y * columns + x] = pixels[Math.round(Math.sqrt(level * scale) * 255)];
    }
  }
  context.putImageData(image, 0, 0);
}

const shownWeight = (value) => value.toFixed(4);

function shownNumber(value) {
  if (value === null) return "not defined";
  const plain = value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 10000);
  return (plain ? value.toFixed(3) : value.toExponential(2)).replace("-", "−");
}

// A value of a measure, by its index, or of what is no measure, such as a layer; a whole number has no decimals.
const shownValue = (value, at) =>
  value !== null && (measures[at]?.isWhole ?? true) ? String(value).replace("-", "−") : shownNumber(value);

// Isolated, so that a right-to-left token does not reorder its sentence.
const shownToken = (tokens, index) => `${index} ‘\u2068${tokens[index]}\u2069’`;

const clamped = (value, low, high) => Math.max(low, Math.min(value, high));

// The item with the least value, the first of equal ones; undefined without items.
function leastBy(items, valueOf) {
  return items.map((item) => [valueOf(item), item]).reduce((best, other) => (other[0] < best[0] ? other : best), [Infinity])[1];
}

// Indices by weight, largest first; ties in the order of tokens.
function strongest(weights) {
  return [...weights.keys()].sort((a, b) => weights[b] - weights[a] || a - b);
}

// Where the pointer is in a box, as shares of its sides.
function sharesOf({ clientX, clientY }, { left, top, width, height }) {
  return [(clientX - left) / width, (clientY - top) / height];
}

const capitalised = (words) => words[0].toUpperCase() + words.slice(1);

const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

const element = (tag, ...rest) => filled(document.createElement(tag), ...rest);

function filled(node, attributes = {}, ...children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const shape = (tag, ...rest) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), ...rest);

// Whether tokens contain the spaces between words, as ␣ or a tokenizer's ·; if not, tokens are drawn with space between.
const hasSpaces = (tokens) => tokens.some((token) => /[␣·]/.test(token));

const lineEnd = (token) => (token.includes("⏎") ? [element("br")] : []);

const byId = (id) => document.getElementById(id);

// The steps of the arrow keys, across and down.
const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const BUTTONS = "button, [role='button']";
const hasModifier = (event) => event.ctrlKey || event.altKey || event.metaKey || event.shiftKey;

// A roving tab stop: the arrow keys move between the buttons, and Tab returns to the last one.
function rove(container, step) {
  container.addEventListener("keydown", (event) => {
    if (hasModifier(event)) return;
    const buttons = [...container.querySelectorAll(BUTTONS)];
    const at = buttons.indexOf(event.target);
    const to = at < 0 ? undefined : step(event.key, at, buttons);
    if (to === undefined) return;
    event.preventDefault();
    buttons[Math.max(0, Math.min(to, buttons.length - 1))].focus();
  });
  container.addEventListener("focusin", (event) => {
    const button = event.target.closest(BUTTONS);
    if (button) keepStop(container, button);
  });
}

// The steps of a row or a column of tokens.
const STEPS = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1, Home: -Infinity, End: Infinity };
const alongTokens = (key, at) => (key in STEPS ? at + STEPS[key] : undefined);

function keepStop(container, button) {
  for (const other of container.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  button.tabIndex = 0;
}
