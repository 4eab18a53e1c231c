// The data of the file, and how numbers, tokens and colours are shown.

const atlas = JSON.parse(document.getElementById("atlas-data").textContent);
const { tokens, measures } = atlas;
const size = tokens.length;
const LEVELS = 65535;

// In the order of layers: {layer, name, values, weights}, a label and a fragment identifier.
const heads = atlas.heads.map((head) => ({
  ...head,
  label: `layer ${head.layer} head ${head.name}`,
  hash: `#layer-${head.layer}-head-${encodeURIComponent(head.name)}`,
}));

// A map's levels, row by row, decoded on first use. All machines that run browsers are little-endian.
function levels(head) {
  if (typeof head.weights === "string") {
    const bytes = Uint8Array.from(atob(head.weights), (character) => character.charCodeAt(0));
    head.weights = new Uint16Array(bytes.buffer);
  }
  return head.weights;
}

const weight = (head, query, key) => levels(head)[query * size + key] / LEVELS;

// The colours of 256 steps of the square root, as ABGR pixels.
const pixels = Uint32Array.from(atlas.colours, (colour) => {
  const rgb = parseInt(colour.slice(1), 16);
  return 0xff000000 | ((rgb & 0xff) << 16) | (rgb & 0xff00) | (rgb >> 16);
});

function drawMap(canvas, head) {
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  new Uint32Array(image.data.buffer).set(
    Uint32Array.from(levels(head), (level) => pixels[Math.round(Math.sqrt(level / LEVELS) * 255)]),
  );
  context.putImageData(image, 0, 0);
}

const shownWeight = (value) => value.toFixed(4);

function shownNumber(value) {
  if (value === null) return "not defined";
  const plain = value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 10000);
  return (plain ? value.toFixed(3) : value.toExponential(2)).replace("-", "−");
}

// Isolated, so that a right-to-left token does not reorder its sentence.
const shownToken = (index) => `${index} ‘\u2068${tokens[index]}\u2069’`;

// Indices by weight, largest first; ties in the order of tokens.
function strongest(weights) {
  return [...weights.keys()].sort((a, b) => weights[b] - weights[a] || a - b);
}

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

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

function keepStop(container, button) {
  for (const other of container.querySelectorAll('button[tabindex="0"]')) other.tabIndex = -1;
  button.tabIndex = 0;
}
