// The queries, keys or outputs of a head at the same places of the data, projected to their first two principal components.
// A lasso, or a rectangle by keyboard, lists the places inside; they stay chosen from head to head.

const VECTORS = { queries: "queries", keys: "keys", outputs: "outputs" };
const SHADES = { token: "token", position: "position" };
const SIZE = 0.021; // of a point, where the largest coordinate is 1
const REACH_OF_POINT = 0.06;
const STEP = 0.05; // of the rectangle
const MOST_INSIDE = 50;
// Each of the most frequent tokens has a colour and a symbol.
const SYMBOLS = [
  "M-1 0A1 1 0 1 1 1 0A1 1 0 1 1-1 0Z",
  "M-.9-.9H.9V.9H-.9Z",
  "M0-1.2L1.2.9H-1.2Z",
  "M0-1.3L1.1 0 0 1.3-1.1 0Z",
  "M0 1.2L1.2-.9H-1.2Z",
  "M-.4-1.2H.4V-.4H1.2V.4H.4V1.2H-.4V.4H-1.2V-.4H-.4Z",
  "M-1.2-.5H1.2V.5H-1.2Z",
  "M-.5-1.2H.5V1.2H-.5Z",
];

const plane = byId("plane");
let marks = []; // of the points: {index, x, y, node}
let inside = new Set(); // the indices of the chosen points
let outline = []; // of the lasso, while it is drawn
let area = null; // the rectangle: {x, y, across, down}, its centre and half its sides

const pointsOf = (head) => events.points[head.kind.name];
const vectors = () => document.querySelector("#vectors :checked").value;
const tokenOf = ({ snippet, query }) => snippet[query];

function makeProjection() {
  if (!events) return;
  for (const [id, options] of Object.entries({ vectors: VECTORS, shades: SHADES })) {
    byId(id).append(...radios(id, options, () => showProjection(shown.head)));
    byId(id).querySelector("input").checked = true;
  }
  const at = ({ clientX, clientY }) => {
    const box = plane.getBoundingClientRect();
    return [((clientX - box.left) / box.width) * 2.2 - 1.1, ((clientY - box.top) / box.height) * 2.2 - 1.1];
  };
  plane.addEventListener("pointerdown", (event) => {
    plane.setPointerCapture(event.pointerId);
    outline = [at(event)];
    area = null;
  });
  plane.addEventListener("pointermove", (event) => {
    if (!outline.length) return tellPoint(...at(event));
    outline.push(at(event));
    drawOutline();
  });
  const end = () => {
    if (outline.length) choose(({ x, y }) => isWithin(outline, x, y));
    outline = [];
  };
  for (const kind of ["pointerup", "pointercancel"]) plane.addEventListener(kind, end);
  plane.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape" && inside.size) clear();
    else if (event.key in WAYS) moveArea(WAYS[event.key], event.shiftKey);
    else return;
    event.preventDefault();
  });
}

// Move the rectangle, or make it longer to the right and downwards, shorter to the left and upwards.
function moveArea([across, down], isResized) {
  if (!area) area = { x: 0, y: 0, across: 0.25, down: 0.25 };
  else if (isResized) {
    area.across = Math.max(STEP, Math.min(area.across + across * STEP, 1.1));
    area.down = Math.max(STEP, Math.min(area.down + down * STEP, 1.1));
  } else {
    area.x = Math.max(-1, Math.min(area.x + across * STEP, 1));
    area.y = Math.max(-1, Math.min(area.y + down * STEP, 1));
  }
  choose(({ x, y }) => Math.abs(x - area.x) <= area.across && Math.abs(y - area.y) <= area.down);
}

// Whether a point is within a closed outline, by the number of its edges to the right.
function isWithin(outline, x, y) {
  const isCrossed = ([x1, y1], at) => {
    const [x2, y2] = outline.at(at - 1);
    return y1 > y !== y2 > y && x < x1 + ((x2 - x1) * (y - y1)) / (y2 - y1);
  };
  return outline.filter(isCrossed).length % 2 === 1;
}

function choose(isInside) {
  inside = new Set(marks.filter(isInside).map(({ index }) => index));
  drawOutline();
  showInside();
}

function clear() {
  [area, outline] = [null, []];
  choose(() => false);
}

function drawOutline() {
  const corners = area && [[-1, -1], [1, -1], [1, 1], [-1, 1]].map(([x, y]) => [area.x + x * area.across, area.y + y * area.down]);
  const path = corners ?? outline;
  byId("lasso").setAttribute("d", path.length ? `M${path.map((corner) => corner.join(" ")).join("L")}Z` : "");
}

function showInside() {
  plane.classList.toggle("chosen-some", inside.size > 0);
  for (const { index, node } of marks) node.classList.toggle("inside", inside.has(index));
  const all = pointsOf(shown.head);
  const chosenPoints = [...inside].map((index) => all[index]);
  byId("inside-title").textContent = inside.size ? `${inside.size} of ${count(all.length, "point")}` : "No points chosen";
  const rest = chosenPoints.length - MOST_INSIDE;
  byId("inside").replaceChildren(
    ...chosenPoints.slice(0, MOST_INSIDE).map((point) => {
      const place = element("span", { class: "small muted" }, placeOf(point));
      return element("li", {}, runningText(point.snippet, { [point.query]: "query" }), " ", place);
    }),
    ...(rest > 0 ? [element("li", { class: "small muted" }, `and ${rest} more`)] : []),
  );
}

// Name the point at the pointer.
function tellPoint(x, y) {
  const far = (mark) => Math.hypot(mark.x - x, mark.y - y);
  const mark = marks.reduce((best, other) => (best && far(best) <= far(other) ? best : other), undefined);
  const isNear = mark && far(mark) <= REACH_OF_POINT;
  const point = isNear && pointsOf(shown.head)[mark.index];
  byId("point").replaceChildren(
    ...(point ? [runningText(point.snippet, { [point.query]: "query" }), ` ${placeOf(point)}`] : ["Drag around points to list them."]),
  );
}

function showProjection(head) {
  const { projection } = head.events;
  byId("projection").hidden = !projection;
  if (!projection) return;
  const all = pointsOf(head);
  const places = new Int16Array(decoded(projection[vectors()]).buffer);
  const byToken = Map.groupBy(all, tokenOf);
  const frequent = [...byToken.keys()].sort((a, b) => byToken.get(b).length - byToken.get(a).length).slice(0, SYMBOLS.length);
  const isByToken = document.querySelector("#shades :checked").value === "token";
  const furthest = Math.max(1, ...all.map(({ at }) => at));
  marks = all.map((point, index) => {
    const [x, y] = [places[2 * index] / 32767, -places[2 * index + 1] / 32767];
    const number = isByToken ? frequent.indexOf(tokenOf(point)) : -1;
    const node = symbol(number, `translate(${x} ${y}) scale(${SIZE})`);
    if (!isByToken) node.style.setProperty("fill", atlas.colours[Math.round((point.at / furthest) * 255)]);
    node.classList.toggle("unmatched", !isPointMatch(point));
    return { index, x, y, node };
  });
  byId("marks").replaceChildren(...marks.map(({ node }) => node));
  const shares = projection.explained[vectors()].map((share) => `${(100 * share).toFixed(1)} %`);
  byId("explained").textContent = `They explain ${shares.join(" and ")} of the variance of the ${vectors()}.`;
  const rest = all.length - frequent.reduce((sum, id) => sum + byToken.get(id).length, 0);
  const keys = frequent.map((id, number) => [number, events.tokens[id], byToken.get(id).length]);
  byId("point-keys").replaceChildren(
    ...(isByToken ? [...keys, ...(rest ? [[-1, "others", rest]] : [])] : []).map(([number, words, size]) => {
      const key = shape("svg", { class: "swatch", viewBox: "-2 -2 4 4", "aria-hidden": "true" }, symbol(number, ""));
      return element("li", {}, key, " ", number < 0 ? words : element("bdi", {}, words), ` ${size}`);
    }),
  );
  byId("positions").hidden = isByToken;
  byId("furthest").textContent = furthest;
  drawOutline();
  showInside();
}

const symbol = (number, transform) =>
  shape("path", { class: number < 0 ? "other" : `symbol-${number}`, d: SYMBOLS[Math.max(0, number)], transform });
