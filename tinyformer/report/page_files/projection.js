// The queries, keys or outputs of a head at the same places of the data, on their first two principal components. A lasso, or
// a rectangle by keyboard, lists the places inside; they stay chosen from head to head.

const EDGE_OF_PLANE = 1.1; // where the largest coordinate is 1
const SIZE = 0.021; // of a point
const REACH_OF_POINT = 0.06; // of the pointer
const STEP = 0.05; // of the rectangle
const FIRST_AREA = [0, 0, 0.25, 0.25];
const MOST_INSIDE = 50;
// The symbol of each of the most frequent tokens, beside its colour.
const SYMBOLS = ["M-1 0A1 1 0 1 1 1 0A1 1 0 1 1-1 0Z", "M-.9-.9H.9V.9H-.9Z", "M0-1.2L1.2.9H-1.2Z", "M0-1.3L1.1 0 0 1.3-1.1 0Z"];
SYMBOLS.push("M0 1.2L1.2-.9H-1.2Z", "M-.4-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4Z", "M-1.2-.5H1.2V.5H-1.2Z", "M-.5-1.2H.5V1.2H-.5Z");

const plane = byId("plane");
let sampledPoints = []; // the points of the kind, the same for its heads
let marks = []; // of the points: {index, x, y, node}
let inside = []; // the indices of the chosen points
let outline = []; // of the lasso, while it is drawn, or of the rectangle
let area = null; // the rectangle: its centre, x and y, and half its sides

const tokenOf = ({ snippet, query }) => snippet[query];
const pointText = (point) => [runningText(point.snippet, { [point.query]: "query" }), " ", aside(placeOf(point))];

function makeProjection() {
  byId("projection").addEventListener("change", () => showProjection(shown.head));
  const at = (event) => sharesOf(event, plane.getBoundingClientRect()).map((share) => (2 * share - 1) * EDGE_OF_PLANE);
  plane.addEventListener("pointerdown", (event) => {
    plane.setPointerCapture(event.pointerId);
    [area, outline] = [null, [at(event)]];
  });
  plane.addEventListener("pointermove", (event) => {
    if (!plane.hasPointerCapture(event.pointerId)) return tellPoint(...at(event));
    outline.push(at(event));
    drawOutline();
  });
  plane.addEventListener("lostpointercapture", choose);
  plane.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key in WAYS) moveArea(WAYS[event.key], event.shiftKey);
    else if (event.key === "Escape" && outline.length + inside.length) [area, outline] = [null, []];
    else return;
    choose();
    event.preventDefault();
  });
}

// Move the rectangle; or make it wider or higher, to the left and upwards less so.
function moveArea([right, below], isResized) {
  const by = isResized ? [0, 0, right, below] : [right, below, 0, 0];
  area = (area ?? FIRST_AREA).map((value, at) => clamped(value + STEP * by[at], at < 2 ? -1 : STEP, EDGE_OF_PLANE));
  const [x, y, across, down] = area;
  outline = [[x - across, y - down], [x + across, y - down], [x + across, y + down], [x - across, y + down]];
}

// Whether a point is within the outline, by the number of its edges to the right.
function isWithin({ x, y }) {
  const isCrossed = ([x1, y1], at) => {
    const [x2, y2] = outline.at(at - 1);
    return y1 > y !== y2 > y && x < x1 + ((x2 - x1) * (y - y1)) / (y2 - y1);
  };
  return outline.filter(isCrossed).length % 2 === 1;
}

// Choose the points inside the outline.
function choose() {
  inside = marks.filter(isWithin).map(({ index }) => index);
  drawOutline();
  showInside();
}

const drawOutline = () => byId("lasso").setAttribute("d", outline.length ? `M${outline.join("L")}Z` : "");

function showInside() {
  plane.classList.toggle("chosen-some", inside.length > 0);
  for (const { index, node } of marks) node.classList.toggle("inside", inside.includes(index));
  byId("inside-title").textContent = inside.length ? `${inside.length} of ${count(sampledPoints.length, "point")}` : "No points chosen";
  const rest = inside.length - MOST_INSIDE;
  const items = inside.slice(0, MOST_INSIDE).map((index) => element("li", {}, ...pointText(sampledPoints[index])));
  byId("inside").replaceChildren(...items, ...(rest > 0 ? [element("li", {}, `and ${rest} more`)] : []));
}

// Name the point at the pointer.
function tellPoint(x, y) {
  const far = (mark) => Math.hypot(mark.x - x, mark.y - y);
  const mark = leastBy(marks.filter((other) => far(other) <= REACH_OF_POINT), far);
  byId("point").replaceChildren(...(mark ? pointText(sampledPoints[mark.index]) : ["Drag around points to list them."]));
}

function showProjection(head) {
  const { projection } = head.events;
  const [vectors, shades] = ["vectors", "shades"].map((name) => document.querySelector(`[name="${name}"]:checked`).value);
  const isByToken = shades === "token";
  if (sampledPoints !== events.points[head.kind.name]) [sampledPoints, inside] = [events.points[head.kind.name], []];
  [area, outline] = [null, []];
  const places = new Int16Array(decoded(projection[vectors]).buffer);
  const byToken = [...Map.groupBy(sampledPoints, tokenOf)].sort(([, a], [, b]) => b.length - a.length);
  const frequent = byToken.slice(0, SYMBOLS.length).map(([id]) => id);
  const furthest = Math.max(1, ...sampledPoints.map(({ at }) => at));
  marks = sampledPoints.map((point, index) => {
    const [x, y] = [places[2 * index] / 32767, -places[2 * index + 1] / 32767];
    const node = symbol(isByToken ? frequent.indexOf(tokenOf(point)) : -1, { transform: `translate(${x} ${y}) scale(${SIZE})` });
    if (!isByToken) node.style.setProperty("fill", atlas.colours[Math.round((point.at / furthest) * 255)]);
    node.classList.toggle("unmatched", Boolean(matching) && !matching.has(tokenOf(point)));
    return { index, x, y, node };
  });
  byId("marks").replaceChildren(...marks.map(({ node }) => node));
  byId("explained").textContent = `They explain ${projection.explained[vectors].map(percent).join(" and ")} of the variance of the ${vectors}.`;
  const rest = byToken.slice(SYMBOLS.length).reduce((sum, [, of]) => sum + of.length, 0);
  const keys = byToken.slice(0, SYMBOLS.length).map(([id, of], number) => [number, element("bdi", {}, events.tokens[id]), of.length]);
  const box = { class: "swatch", viewBox: "-2 -2 4 4", "aria-hidden": "true" };
  const items = [...keys, [-1, "others", rest]].filter(([, , size]) => size);
  byId("point-keys").replaceChildren(
    ...items.map(([number, words, size]) => element("li", {}, shape("svg", box, symbol(number)), " ", words, ` ${size}`)),
  );
  byId("point-keys").hidden = !isByToken;
  byId("positions").hidden = isByToken;
  byId("furthest").textContent = furthest;
  drawOutline();
  showInside();
}

const symbol = (number, rest) =>
  shape("path", { class: number < 0 ? "other" : `symbol-${number}`, d: SYMBOLS[Math.max(0, number)], ...rest });
