// All heads of a kind as points of a plane: each axis and the colour show a measure, or the layer.

const LAYER = -1; // beside the indices of measures
const NEAR = 24; // pixels within which the pointer finds a point
const MOST_MOVING = 600; // points that move smoothly
const MOST_LISTED = 60;
const BEYOND = 100000; // more than any distance
const LABEL = 110; // the space beside a point for its label
const MARGIN = { left: 66, right: 22, top: 18, bottom: 54 }; // around the points
const GAP = 10; // between the points and the ends of the axes

const scatterPlot = byId("plot");
const points = byId("points");
let pointed; // the head that is named

// What the axes and the colour show, and the measures to open with, where a kind has one of them.
const choices = { x: byId("across-choice"), y: byId("up-choice"), colour: byId("colour-choice") };
const OPENING = { x: ["previous_token", "coverage"], y: ["induction", "monotonicity"], colour: ["importance"] };

const chosen = (side) => Number(choices[side].value);
const nameOf = (choice) => (choice === LAYER ? "layer" : measures[choice].name);
const valueOf = (head, choice) => (choice === LAYER ? head.layer : head.values[choice]);
const isPlaced = (head) => ["x", "y"].every((side) => valueOf(head, chosen(side)) !== null);
const placed = () => ofKind(chosenKind).filter(isPlaced);
const numbersOf = (head) => Object.keys(choices).map((side) => [nameOf(chosen(side)), shownValue(valueOf(head, chosen(side)), chosen(side))]);

// A linear axis between two places, with ticks 1, 2 or 5 times a power of ten apart, about as many as asked for. It spans the
// values of all steps of a film, so that it stands still.
function axisOf(choice, from, to, number = Math.abs(to - from) / 80) {
  const ofSteps = (head) => (choice === LAYER ? [] : (head.film?.values.map((of) => of[choice]) ?? []));
  const values = ofKind(chosenKind).flatMap((head) => [valueOf(head, choice), ...ofSteps(head)]).filter((value) => value !== null);
  const [least, most] = [Math.min, Math.max].map((of) => values.reduce((best, value) => of(best, value), values[0] ?? 0));
  const largest = Math.max(Math.abs(least), Math.abs(most));
  const margin = most - least > 1e-6 * largest ? 0 : largest / 10 || 0.5; // values that are equal but for rounding
  const [low, high] = [least - margin, most + margin];
  const power = 10 ** Math.floor(Math.log10((high - low) / number));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= (0.8 * (high - low)) / number);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 0.01));
  const places = Math.max(1, digits + Math.floor(Math.log10(largest))); // as many as tell ticks apart
  const written = (value) => (step < 0.0001 && largest < 0.001 ? value.toExponential(places) : value.toFixed(digits)).replaceAll("-", "−");
  const place = (value) => from + ((value - low) / (high - low)) * (to - from);
  const first = Math.ceil(low / step - 0.001);
  const ticks = Array.from({ length: Math.floor(high / step + 0.001) - first + 1 }, (_, at) => (first + at) * step || 0);
  return { choice, place, ticks: ticks.map((value) => [place(value), written(value)]) };
}

function makeScatter() {
  heads.forEach((head, index) => {
    head.point = shape("circle", { role: "button", tabindex: -1, r: 5.5, "data-point": index, class: head.ablated ? "ablated" : "" });
  });
  const headOf = (node) => heads[node.dataset.point];
  const headAt = (event) => {
    const { left, top } = scatterPlot.getBoundingClientRect();
    const far = ({ place }) => Math.hypot(place.x - event.clientX + left, place.y - event.clientY + top);
    return leastBy(placed().filter((head) => far(head) <= NEAR), far);
  };
  for (const choice of Object.values(choices)) choice.addEventListener("change", redrawScatter);
  scatterPlot.addEventListener("pointermove", (event) => pointAtHead(headAt(event)));
  scatterPlot.addEventListener("pointerleave", () => pointAtHead(headOf(document.activeElement)));
  scatterPlot.addEventListener("click", (event) => headAt(event) && openHead(headAt(event), "point"));
  points.addEventListener("focusin", (event) => pointAtHead(headOf(event.target)));
  points.addEventListener("focusout", () => pointAtHead());
  points.addEventListener("keydown", (event) => {
    if (hasModifier(event) || ![" ", "Enter"].includes(event.key)) return;
    event.preventDefault();
    openHead(headOf(event.target), "point");
  });
  rove(points, (key, at, nodes) => (key in WAYS ? nodes.indexOf(nextHead(headOf(nodes[at]), WAYS[key]).point) : undefined));
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
  const height = Math.round(clamped(0.6 * width, 280, 480));
  scatterPlot.setAttribute("height", height);
  const across = axisOf(chosen("x"), MARGIN.left, width - MARGIN.right);
  const up = axisOf(chosen("y"), height - MARGIN.bottom, MARGIN.top);
  const colour = axisOf(chosen("colour"), 0, 1, 6);
  drawAxes(across, up, width, height);
  showColours(colour);
  const drawn = placed();
  points.classList.toggle("moving", points.children.length > 0 && drawn.length <= MOST_MOVING);
  for (const head of drawn) {
    const value = valueOf(head, colour.choice);
    head.place = { x: across.place(valueOf(head, across.choice)), y: up.place(valueOf(head, up.choice)) };
    head.point.style.setProperty("cx", `${head.place.x}px`);
    head.point.style.setProperty("cy", `${head.place.y}px`);
    head.point.style.setProperty("--shade", value === null ? "none" : atlas.colours[Math.round(colour.place(value) * 255)]);
    head.point.setAttribute("aria-label", [head.title, ...notesOf(head), ...numbersOf(head).map((pair) => pair.join(" "))].join(", "));
  }
  const isSame = points.children.length === drawn.length && drawn.every(({ point }, at) => points.children[at] === point);
  if (!isSame) points.replaceChildren(...drawn.map(({ point }) => point)); // a point that stays keeps the focus
  if (drawn.length && !points.querySelector('[tabindex="0"]')) drawn[0].point.tabIndex = 0;
  showLabels(drawn.length > MOST_MOVING ? [] : drawn, width);
  const missing = ofKind(chosenKind).filter((head) => !isPlaced(head));
  byId("not-drawn").replaceChildren(...(missing.length ? ["Not defined: ", ...headLinks(missing)] : []));
  pointAtHead(drawn.includes(pointed) ? pointed : undefined);
}

// Write the labels of heads that cover no other point.
function showLabels(drawn, width) {
  const labels = drawn.map(({ label, place: { x, y } }) => {
    const way = x > width - LABEL ? -1 : 1;
    const space = way < 0 ? 2 * LABEL : LABEL; // another label may point here
    const isFree = ({ place }) => way * (place.x - x) <= 0 || way * (place.x - x) > space || Math.abs(place.y - y) > 12;
    return label && drawn.every(isFree) ? shape("text", { x: x + way * 10, y: y + 4, "text-anchor": way < 0 ? "end" : "start" }, label) : "";
  });
  byId("labels").replaceChildren(...labels);
}

// Buttons that open heads, with a word about each.
function headLinks(listed, words = () => "") {
  const links = listed.slice(0, MOST_LISTED).flatMap((head) => {
    const link = element("button", { type: "button", class: "link" }, head.title, words(head));
    link.addEventListener("click", () => openHead(head));
    return [link, " "];
  });
  return listed.length > MOST_LISTED ? [...links, `and ${listed.length - MOST_LISTED} more`] : links;
}

function drawAxes(across, up, width, height) {
  const [left, right, top, bottom] = [MARGIN.left - GAP, width - MARGIN.right + GAP, MARGIN.top - GAP, height - MARGIN.bottom + GAP];
  const text = (x, y, anchor, words, rest) => shape("text", { x, y, "text-anchor": anchor, ...rest }, words);
  const sideways = { class: "axis", transform: `rotate(-90 12 ${(top + bottom) / 2})` };
  byId("axes").replaceChildren(
    ...across.ticks.map(([x]) => shape("path", { d: `M${x} ${bottom}V${top}` })),
    ...up.ticks.map(([y]) => shape("path", { d: `M${left} ${y}H${right}` })),
    ...across.ticks.map(([x, words]) => text(x, bottom + 16, "middle", words)),
    ...up.ticks.map(([y, words]) => text(left - 6, y + 4, "end", words)),
    text((left + right) / 2, height - 8, "middle", nameOf(across.choice), { class: "axis" }),
    text(12, (top + bottom) / 2, "middle", nameOf(up.choice), sideways),
  );
}

function showColours({ choice, ticks }) {
  byId("colours").style.setProperty("--scale", atlas.colours.join(","));
  byId("colours").replaceChildren(...ticks.map(([, words]) => element("span", {}, words)));
  ticks.forEach(([at], index) => byId("colours").children[index].style.setProperty("--at", at));
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
  filled(byId("ring"), { cx: x, cy: y });
  const [shift, anchor] = x > scatterPlot.clientWidth / 2 ? [-12, "end"] : [12, "start"];
  filled(byId("point-label"), { x: x + shift, y: y + (y < 40 ? 20 : -10), "text-anchor": anchor });
  const here = placed().filter(({ place }) => place.x === x && place.y === y).length;
  byId("point-label").textContent = head.title + (here > 1 ? ` and ${here - 1} more` : "");
  byId("pointed-title").textContent = [capitalised(head.title), ...notesOf(head)].join(", ");
  const numbers = numbersOf(head).map(([name, value]) => element("div", {}, element("dt", {}, name), " ", element("dd", {}, value)));
  byId("pointed-numbers").replaceChildren(...numbers);
  drawMap(byId("pointed-map"), head);
}

// The nearest head in a direction, rather within 45 degrees of it; heads at the same place follow each other.
function nextHead(head, [across, down]) {
  const order = across + down > 0 ? placed() : placed().toReversed();
  const far = (other) => {
    const [x, y] = [other.place.x - head.place.x, other.place.y - head.place.y];
    if (x === 0 && y === 0) return order.indexOf(other) > order.indexOf(head) ? 0 : Infinity;
    const [along, aside] = [across * x + down * y, Math.abs(across * y + down * x)];
    return along > 0 ? Math.hypot(x, y) + (aside > along ? BEYOND : 0) : Infinity;
  };
  return leastBy(order, far) ?? head;
}
