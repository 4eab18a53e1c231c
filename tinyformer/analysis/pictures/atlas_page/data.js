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

// A map's levels, row by row, decoded on first use. All machines that run browsers are little-endian.
function levels(head) {
  if (typeof head.weights === "string") {
    const bytes = Uint8Array.from(atob(head.weights), (character) => character.charCodeAt(0));
    head.weights = new Uint16Array(bytes.buffer);
  }
  return head.weights;
}

// Whether the weights on the first key, often an attention sink, are left out.
let hidesFirst = false;
const LEAST = 0.001; // rows whose other weights sum to less are left out as well, since these are rounding errors

// The factor by which the other weights of each query are multiplied, so that its row keeps its sum without the first key.
function factors(head) {
  const columns = head.kind.keys.length;
  head.factors ??= head.kind.queries.map((_, query) => {
    const row = levels(head).subarray(query * columns, (query + 1) * columns);
    const rest = row.subarray(1).reduce((sum, level) => sum + level, 0);
    return rest >= LEAST * LEVELS ? (rest + row[0]) / rest : 0;
  });
  return head.factors;
}

function weight(head, query, key) {
  const stored = levels(head)[query * head.kind.keys.length + key] / LEVELS;
  if (!hidesFirst) return stored;
  return key === 0 ? 0 : stored * factors(head)[query];
}

// The colours of 256 steps of the square root, as ABGR pixels.
const pixels = Uint32Array.from(atlas.colours, (colour) => {
  const rgb = parseInt(colour.slice(1), 16);
  return 0xff000000 | ((rgb & 0xff) << 16) | (rgb & 0xff00) | (rgb >> 16);
});

function drawMap(canvas, head) {
  const columns = (canvas.width = head.kind.keys.length);
  canvas.height = head.kind.queries.length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const colours = new Uint32Array(image.data.buffer);
  for (let at = 0; at < colours.length; at++) {
    colours[at] = pixels[Math.round(Math.sqrt(weight(head, Math.floor(at / columns), at % columns)) * 255)];
  }
  context.putImageData(image, 0, 0);
}

const shownWeight = (value) => value.toFixed(4);

function shownNumber(value) {
  if (value === null) return "not defined";
  const plain = value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 10000);
  return (plain ? value.toFixed(3) : value.toExponential(2)).replace("-", "−");
}

// Isolated, so that a right-to-left token does not reorder its sentence.
const shownToken = (tokens, index) => `${index} ‘\u2068${tokens[index]}\u2069’`;

// Indices by weight, largest first; ties in the order of tokens.
function strongest(weights) {
  return [...weights.keys()].sort((a, b) => weights[b] - weights[a] || a - b);
}

const capitalised = (words) => words[0].toUpperCase() + words.slice(1);

const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Whether tokens contain the spaces between words, as ␣ or a tokenizer's ·; if not, tokens are drawn with space between.
const hasSpaces = (tokens) => tokens.some((token) => /[␣·]/.test(token));

const lineEnd = (token) => (token.includes("⏎") ? [element("br")] : []);

const byId = (id) => document.getElementById(id);

// A roving tab stop: the arrow keys move between the buttons, and Tab returns to the last one.
function rove(container, step) {
  container.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
    const buttons = [...container.querySelectorAll("button")];
    const at = buttons.indexOf(event.target);
    const to = at < 0 ? undefined : step(event.key, at, buttons);
    if (to === undefined) return;
    event.preventDefault();
    buttons[Math.max(0, Math.min(to, buttons.length - 1))].focus();
  });
  container.addEventListener("focusin", (event) => {
    const button = event.target.closest("button");
    if (button) keepStop(container, button);
  });
}

// The steps of a row or a column of tokens.
const STEPS = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1, Home: -Infinity, End: Infinity };
const alongTokens = (key, at) => (key in STEPS ? at + STEPS[key] : undefined);

function keepStop(container, button) {
  for (const other of container.querySelectorAll('button[tabindex="0"]')) other.tabIndex = -1;
  button.tabIndex = 0;
}
