// Training as a film, where the file has one: a slider over snapshots, at each of which every head has its own map, values
// and label. The weights w of all but the last snapshot are stored as round(255 √w).

const { film } = atlas;
const last = film ? film.steps.length - 1 : 0;
const SECONDS = 9; // of the whole film
const SHORTEST = 0.1; // seconds of a snapshot
const LONGEST = 0.4;
const MOST_NAMED = 3; // heads, or events at one snapshot

const playButton = byId("play");
const slider = byId("frame");
const ticks = byId("ticks");
let frame = last;
let playing = null;
let isOpening = true; // until a snapshot is chosen; to play then begins with the first one

const several = (names, mark) =>
  names.slice(0, MOST_NAMED).join(mark) + (names.length > MOST_NAMED ? `${mark}and ${names.length - MOST_NAMED} more` : "");

// The events at each snapshot; those between two belong to the later one.
const placeInFilm = ({ step }) => film.steps.findIndex((other) => other >= step);
const happenings = Map.groupBy(film?.events ?? [], placeInFilm);
const NOTHING = "No head acquired or lost a role between these snapshots.";
const sentencesOf = (at) => capitalised(several(happenings.get(at).map(({ text }) => text), "; "));

// The range of all numbers of some curves, so that none changes its place while it grows.
function rangeOf(curves) {
  const numbers = curves.flat().filter((value) => value !== null);
  return numbers.length ? [Math.min(...numbers), Math.max(...numbers)] : [0, 0];
}

// A curve over all snapshots, faint, and up to this one, with a dot at its end; a gap where it is not defined.
function curve(values, [low, high], kind = "") {
  const place = (value, at) => `${(at / (last || 1)) * 100} ${100 - ((value - low) / (high - low || 1)) * 100}`;
  const path = (part, first = 0) =>
    part.map((value, at) => (value === null ? "" : `${part[at - 1] == null ? "M" : "L"}${place(value, at + first)}`)).join("");
  const paths = [
    ["ahead", path(values)],
    ["behind", path(values.slice(0, frame + 1))],
    ["dot", values[frame] === null ? "" : `M${place(values[frame], frame)}h0`],
  ];
  return paths.map(([part, d]) => shape("path", { class: `${part} ${kind}`, d }));
}

const STRETCHED = { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" };
const plotOf = (...curves) => shape("svg", STRETCHED, ...curves.flat());

// The loss, and the chosen measure of all heads that are shown.
function drawCurves() {
  const measure = chosenMeasure();
  const of = ofKind(chosenKind);
  const series = measure < 0 ? [] : of.map((head) => head.film.values.map((values) => values[measure]));
  const name = measures[measure]?.name;
  const became = new Set(film.events.filter((event) => event.measure === name).map((event) => heads[event.head]));
  const named = headView.hidden || !shown.head ? of.filter((head) => became.has(head)) : [shown.head];
  const range = rangeOf(series);
  const order = [...of.keys()].sort((a, b) => named.includes(of[a]) - named.includes(of[b]));
  const lossRange = rangeOf([film.loss]);
  byId("curves").replaceChildren(
    plotOf(
      ...order.map((at) => curve(series[at] ?? [], range, named.includes(of[at]) ? "named" : "")),
      curve(film.loss, lossRange, "loss"),
      shape("path", { class: "now", d: `M${(frame / (last || 1)) * 100} 0V100` }),
    ),
  );
  const extent = (ends, at) => ends.map((end) => (at === undefined ? shownNumber(end) : shownValue(end, at))).join(" to ");
  const words = several(named.map((head) => head.title), ", ");
  byId("curves-of").textContent = name ? `${name} of all heads, ${extent(range, measure)}${words && `; bold: ${words}`}` : "";
  byId("curves-loss").textContent = `loss, ${extent(lossRange)} nats per target`;
}

// A measure of a head by step, below its value.
function growth(head, at) {
  if (!film) return [];
  const values = head.film.values.map((of) => of[at]);
  return [element("span", { class: "growth" }, plotOf(curve(values, rangeOf([values]))))];
}

function showFrame(to) {
  frame = clamped(to, 0, last);
  const now = new Set((happenings.get(frame) ?? []).map(({ head }) => heads[head]));
  for (const head of heads) {
    const { maps, values, labels } = head.film;
    head.isQuantised = frame < last;
    head.weights = head.isQuantised ? maps[frame] : head.exact;
    head.factors = undefined;
    head.values = values[frame];
    head.label = head.ablated ? "" : labels[frame];
  }
  if (headView.hidden) redrawScatter(); // first, since it reads the layout; it is drawn again when it comes into view
  for (const head of heads) {
    head.button.querySelector(".note").textContent = head.label;
    head.button.classList.toggle("happens", now.has(head));
  }
  redrawThumbnails();
  showValues();
  if (orderChoice.value !== "layers") {
    const focused = document.activeElement;
    arrange();
    if (thumbnails.contains(focused)) focused.focus({ preventScroll: true });
  }
  if (!headView.hidden) showHead(shown.head);
  showPlace();
}

// The place in the film, in words and on the slider.
function showPlace() {
  const loss = film.loss[frame] === null ? "" : `, loss ${shownNumber(film.loss[frame])}`;
  const words = `step ${film.steps[frame].toLocaleString("en")}${loss}`;
  slider.value = frame;
  slider.setAttribute("aria-valuetext", words);
  byId("place").textContent = words;
  tell([...happenings.keys()].filter((at) => at <= frame).sort((a, b) => b - a)[0]);
}

function tell(at) {
  const words = at === undefined ? (happenings.size ? "" : NOTHING) : sentencesOf(at);
  if (byId("happened").textContent !== words) byId("happened").textContent = words;
  byId("happened").classList.toggle("muted", at !== frame);
}

function pause() {
  clearInterval(playing);
  playing = null;
  playButton.textContent = "Play";
  byId("sentence").setAttribute("aria-live", "polite");
}

function togglePlay() {
  if (playing) return pause();
  if (frame === last || isOpening) showFrame(0);
  isOpening = false;
  const seconds = clamped(SECONDS / film.steps.length, SHORTEST, LONGEST);
  playing = setInterval(() => (frame < last ? showFrame(frame + 1) : pause()), seconds * 1000);
  playButton.textContent = "Pause";
  byId("sentence").setAttribute("aria-live", "off"); // it would be read at every snapshot
}

// By hand, which ends playing.
function goToFrame(to) {
  if (playing) pause();
  isOpening = false;
  showFrame(to);
}

function makeTick(at) {
  const tick = element("button", { type: "button", tabindex: -1, "aria-label": sentencesOf(at), title: sentencesOf(at) });
  tick.style.setProperty("--at", at / (last || 1));
  tick.addEventListener("click", () => goToFrame(at));
  tick.addEventListener("focus", () => tell(at));
  tick.addEventListener("blur", showPlace);
  return tick;
}

function makeFilm() {
  document.querySelector("#film").hidden = !film;
  for (const part of document.querySelectorAll('[data-needs="film"]')) part.hidden = !film;
  if (!film) return;
  document.body.classList.add("has-film");
  for (const head of heads) head.exact = head.weights;
  slider.max = last;
  slider.addEventListener("input", () => goToFrame(Number(slider.value)));
  playButton.addEventListener("click", togglePlay);
  ticks.append(...[...happenings.keys()].sort((a, b) => a - b).map(makeTick));
  ticks.hidden = !happenings.size;
  if (happenings.size) ticks.firstChild.tabIndex = 0;
  rove(ticks, alongTokens);
  byId("curves").addEventListener("click", (event) => {
    const box = byId("curves").getBoundingClientRect();
    goToFrame(Math.round(((event.clientX - box.left) / box.width) * last));
  });
  addEventListener("keydown", (event) => {
    const { key, target } = event;
    if (event.defaultPrevented || hasModifier(event) || target.closest("select, textarea")) return;
    if (target.closest('input:not([type="range"], [type="radio"], [type="checkbox"])')) return;
    if (key === " " && !target.closest('button, a, summary, input:not([type="range"])')) togglePlay();
    else if (key === "," || key === ".") goToFrame(frame + (key === "." ? 1 : -1));
    else return;
    event.preventDefault();
  });
  // The maps stand beside the scatter, or above it, since they are looked at while the film plays.
  const maps = [measureChoice.closest(".controls"), byId("sorted"), thumbnails, byId("thumbnails-keys")];
  overview.append(element("div", { class: "film-body" }, element("div", {}, ...maps), byId("scatter")));
  const role = film.events[film.opening]; // the first that a head acquires
  if (role) showKind(heads[role.head].kind);
  const measure = (role ?? film.events.at(-1))?.measure;
  if (measuresOf(chosenKind).some((at) => measures[at].name === measure)) measureChoice.value = measure;
  pause();
  showFrame(role ? placeInFilm(role) : last);
}
