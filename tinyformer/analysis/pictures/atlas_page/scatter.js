// All heads of a kind as points of a plane: each axis and the colour show a measure, or the layer.

const LAYER = -1; // beside the indices of measures
const NEAR = 24; // pixels within which the pointer finds a point
const MOST_MOVING = 600; // points that move smoothly
const MOST_LISTED = 60;
const MARGIN = { left: 56, right: 12, top: 8, bottom: 44, inner: 10 };
const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

let pointed; // the head that is named
const scatterPlot = byId("plot");
const points = byId("points");

// What the axes and the colour show, and the measures to open with, where a kind has one of them.
const choices = { x: byId("across-choice"), y: byId("up-choice"), colour: byId("colour-choice") };
const OPENING = { x: ["previous_token", "coverage"], y: ["induction", "monotonicity"], colour: ["importance"] };

const chosen = (side) => Number(choices[side].value);
const nameOf = (choice) => (choice === LAYER ? "layer" : measures[choice].name);
const valueOf = (head, choice) => (choice === LAYER ? head.layer : head.values[choice]);
const isPlaced = (head) => ["x", "y"].every((side) => valueOf(head, chosen(side)) !== null);

// The smallest and the largest value; over all steps of a film, so that its axes stand still.
function spanOf(choice) {
  let [low, high] = [Infinity, -Infinity];
  for (const head of ofKind(chosenKind)) {
    const steps = choice === LAYER || !head.film ? [] : head.film.values.map((values) => values[choice]);
    for (const value of [valueOf(head, choice), ...steps]) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return [0, 1];
  const margin = low < high ? 0 : Math.abs(low) / 10 || 0.5;
  return [low - margin, high + margin];
}

// Values that are 1, 2 or 5 times a power of ten apart, about as many as asked for, and how they are written.
function ticksOf([low, high], number) {
  const rough = (high - low) / number;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 0.01));
  const isPlain = digits < 5 && Math.max(-low, high) < 100000;
  const written = (value) => (isPlain ? value.toFixed(digits) : value.toExponential(1)).replace("-", "−");
  const first = Math.ceil(low / step - 0.001);
  const size = Math.floor(high / step + 0.001) - first + 1;
  return Array.from({ length: size }, (_, at) => [(first + at) * step, written((first + at) * step || 0)]);
}

function makeScatter() {
  heads.forEach((head, index) => {
    head.point = shape("circle", { role: "button", tabindex: -1, r: 5.5, "data-point": index });
    head.point.classList.toggle("ablated", head.ablated);
  });
  const focused = () => heads[document.activeElement.dataset.point];
  const headAt = (event) => {
    const box = scatterPlot.getBoundingClientRect();
    return nearest(event.clientX - box.left, event.clientY - box.top);
  };
  for (const choice of Object.values(choices)) choice.addEventListener("change", redrawScatter);
  scatterPlot.addEventListener("pointermove", (event) => pointAtHead(headAt(event)));
  scatterPlot.addEventListener("pointerleave", () => pointAtHead(focused()));
  scatterPlot.addEventListener("click", (event) => headAt(event) && openHead(headAt(event), "point"));
  points.addEventListener("focusin", () => pointAtHead(focused()));
  points.addEventListener("focusout", () => pointAtHead());
  points.addEventListener("keydown", (event) => {
    if (event.shiftKey || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key in WAYS) next(focused(), WAYS[event.key]).point.focus();
    else if (event.key === "Enter" || event.key === " ") openHead(focused(), "point");
    else return;
    event.preventDefault();
  });
  new ResizeObserver(redrawScatter).observe(scatterPlot.parentElement);
}

// Offer the measures of the kind; a choice stays where it can.
function listChoices() {
  const offered = [...measuresOf(chosenKind), LAYER];
  const otherwise = { x: offered[0], y: offered[1] ?? LAYER, colour: LAYER };
  for (const [side, select] of Object.entries(choices)) {
    const before = select.value && Number(select.value);
    const opening = offered.find((choice) => OPENING[side].includes(nameOf(choice)));
    select.replaceChildren(...offered.map((choice) => element("option", { value: choice }, nameOf(choice))));
    select.value = offered.includes(before) ? before : (opening ?? otherwise[side]);
  }
}

// Draw the axes, and each head at its values; called again whenever the values change, as from step to step of a film.
function redrawScatter() {
  const width = scatterPlot.parentElement.clientWidth;
  if (!width || !measuresOf(chosenKind).length) return;
  const height = Math.round(Math.max(280, Math.min(0.6 * width, 480)));
  scatterPlot.setAttribute("height", height);
  const [left, right] = [MARGIN.left + MARGIN.inner, width - MARGIN.right - MARGIN.inner];
  const [bottom, top] = [height - MARGIN.bottom - MARGIN.inner, MARGIN.top + MARGIN.inner];
  const across = axisOf(chosen("x"), left, right);
  const up = axisOf(chosen("y"), bottom, top);
  drawAxes(across, up, width, height);
  const colour = axisOf(chosen("colour"), 0, 1, 6);
  showColours(colour);
  const all = ofKind(chosenKind);
  const drawn = all.filter(isPlaced);
  points.classList.toggle("moving", points.children.length > 0 && drawn.length <= MOST_MOVING);
  for (const head of drawn) {
    const value = valueOf(head, colour.choice);
    head.place = { x: across.place(valueOf(head, across.choice)), y: up.place(valueOf(head, up.choice)) };
    head.point.style.setProperty("cx", `${head.place.x}px`);
    head.point.style.setProperty("cy", `${head.place.y}px`);
    head.point.style.setProperty("--shade", value === null ? "none" : atlas.colours[Math.round(colour.place(value) * 255)]);
    head.point.setAttribute("aria-label", [head.title, ...notesOf(head), ...numbersOf(head).map((pair) => pair.join(" "))].join(", "));
  }
  // A point that has the focus keeps it.
  const before = [...points.children];
  if (drawn.length !== before.length || drawn.some((head, at) => head.point !== before[at])) {
    points.replaceChildren(...drawn.map((head) => head.point));
  }
  if (drawn.length && !points.querySelector('[tabindex="0"]')) drawn[0].point.setAttribute("tabindex", 0);
  const missing = all.filter((head) => !isPlaced(head));
  byId("not-drawn").hidden = !missing.length;
  byId("not-drawn").replaceChildren("Not defined: ", ...headLinks(missing));
  pointAtHead(drawn.includes(pointed) ? pointed : undefined);
}

const notesOf = (head) => [head.label, head.ablated ? "ablated" : ""].filter(Boolean);
const numbersOf = (head) => Object.keys(choices).map((side) => [nameOf(chosen(side)), shownNumber(valueOf(head, chosen(side)))]);

// Buttons that open heads, with a word about each.
function headLinks(listed, words = () => "") {
  const buttons = listed.slice(0, MOST_LISTED).map((head) => {
    const button = element("button", { type: "button", class: "link" }, head.title, words(head));
    button.addEventListener("click", () => openHead(head));
    return button;
  });
  const rest = listed.length - buttons.length;
  return [...buttons.flatMap((button) => [button, " "]), ...(rest ? [`and ${rest} more`] : [])];
}

// A linear axis between two places.
function axisOf(choice, from, to, number = Math.abs(to - from) / 80) {
  const [low, high] = spanOf(choice);
  const place = (value) => from + ((value - low) / (high - low)) * (to - from);
  return { choice, place, ticks: ticksOf([low, high], number) };
}

function drawAxes(across, up, width, height) {
  const [left, right, top, bottom] = [MARGIN.left, width - MARGIN.right, MARGIN.top, height - MARGIN.bottom];
  const text = (x, y, anchor, words, rest) => shape("text", { x, y, "text-anchor": anchor, ...rest }, words);
  const sideways = { class: "axis", transform: `rotate(-90 12 ${(top + bottom) / 2})` };
  byId("axes").replaceChildren(
    ...across.ticks.map(([value]) => shape("path", { d: `M${across.place(value)} ${bottom}V${top}` })),
    ...up.ticks.map(([value]) => shape("path", { d: `M${left} ${up.place(value)}H${right}` })),
    ...across.ticks.map(([value, words]) => text(across.place(value), bottom + 16, "middle", words)),
    ...up.ticks.map(([value, words]) => text(left - 6, up.place(value) + 4, "end", words)),
    text((left + right) / 2, height - 8, "middle", nameOf(across.choice), { class: "axis" }),
    text(12, (top + bottom) / 2, "middle", nameOf(up.choice), sideways),
  );
}

function showColours({ choice, place, ticks }) {
  byId("colours").style.setProperty("--scale", atlas.colours.join(","));
  const marks = ticks.map(([value, words]) => {
    const mark = element("span", {}, words);
    mark.style.setProperty("--at", place(value));
    return mark;
  });
  byId("colours").replaceChildren(...marks);
  byId("colour-name").textContent = nameOf(choice);
  byId("colourless").hidden = ofKind(chosenKind).every((head) => valueOf(head, choice) !== null);
  byId("hatched").hidden = !ofKind(chosenKind).some((head) => head.ablated);
}

// Name the head at the pointer or with the focus, with its map and numbers beside the plot.
function pointAtHead(head) {
  pointed = head;
  scatterPlot.classList.toggle("pointed", Boolean(head));
  byId("pointed").hidden = !head;
  if (!head) return;
  const { x, y } = head.place;
  const isRight = x > scatterPlot.clientWidth / 2;
  const label = { x: x + (isRight ? -12 : 12), y: y + (y < 40 ? 20 : -10), "text-anchor": isRight ? "end" : "start" };
  for (const [name, value] of Object.entries({ cx: x, cy: y })) byId("ring").setAttribute(name, value);
  for (const [name, value] of Object.entries(label)) byId("point-label").setAttribute(name, value);
  const others = ofKind(chosenKind).filter((other) => isPlaced(other) && other.place.x === x && other.place.y === y).length - 1;
  byId("point-label").textContent = head.title + (others ? ` and ${others} more` : "");
  byId("pointed-title").textContent = [capitalised(head.title), ...notesOf(head)].join(", ");
  byId("pointed-numbers").replaceChildren(
    ...numbersOf(head).map(([name, value]) => element("div", {}, element("dt", {}, name), " ", element("dd", {}, value))),
  );
  drawMap(byId("pointed-map"), head);
}

// The head whose point is nearest, within reach of the pointer.
function nearest(x, y) {
  const far = ({ place }) => Math.hypot(place.x - x, place.y - y);
  const within = ofKind(chosenKind).filter((head) => isPlaced(head) && far(head) <= NEAR);
  return within.reduce((best, head) => (best && far(best) <= far(head) ? best : head), undefined);
}

// The nearest head in a direction; heads at the same place follow each other.
function next(head, [across, down]) {
  const drawn = ofKind(chosenKind).filter(isPlaced);
  const order = across + down > 0 ? drawn : drawn.toReversed();
  const far = (other) => {
    const [x, y] = [other.place.x - head.place.x, other.place.y - head.place.y];
    if (x === 0 && y === 0) return order.indexOf(other) > order.indexOf(head) ? 0 : Infinity;
    const along = across * x + down * y;
    return along > 0 ? along + 2 * Math.abs(across * y + down * x) : Infinity;
  };
  return order.reduce((best, other) => (far(other) < best.far ? { other, far: far(other) } : best), { other: head, far: Infinity }).other;
}
