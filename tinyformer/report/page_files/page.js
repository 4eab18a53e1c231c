// The page around the two views: routing, focus, legend and theme.

const overview = byId("overview");
const headView = byId("head");

// Whether the head was opened from the overview, so that the browser's history leads back there, and from what in it.
let cameFromOverview = false;
let opener = "button";

// Within a frame, as in a notebook, the address and the history are those of the outer page.
const isFramed = self !== top;
let address = isFramed ? "" : location.hash;

function goTo(hash) {
  if (!isFramed) {
    location.hash = hash;
    return;
  }
  address = hash;
  route();
}

function openHead(head, from = "button") {
  cameFromOverview = true;
  opener = from;
  goTo(head.hash);
}

function goBack() {
  if (cameFromOverview && !isFramed) history.back();
  else goTo("#overview");
}

// The next or previous head in the order of the overview; it replaces this one in the browser's history.
function turn(by) {
  const order = ordered();
  const at = order.indexOf(shown.head) + by;
  const { hash } = order[(at + order.length) % order.length];
  if (isFramed) goTo(hash);
  else location.replace(hash);
}

function route() {
  const head = heads.find((other) => other.hash === address);
  const wasInHead = !headView.hidden;
  overview.hidden = Boolean(head);
  headView.hidden = !head;
  document.title = head ? `${head.title} · ${atlas.title}` : atlas.title;
  if (head) {
    if (head.kind !== chosenKind) showKind(head.kind);
    showHead(head);
    showEvents(head);
    if (film) drawCurves();
    if (wasInHead) return;
    scrollTo(0, 0);
    byId("head-title").focus({ preventScroll: true });
  } else {
    cameFromOverview = false;
    if (film) drawCurves();
    if (wasInHead) (opener === "point" && isPlaced(shown.head) ? shown.head.point : shown.head.button).focus();
  }
}

function makeLegend() {
  const legend = byId("legend");
  legend.style.setProperty("--scale", atlas.colours.join(","));
  const ticks = [0, 0.01, 0.1, 0.25, 0.5, 1];
  for (const tick of ticks) {
    const mark = element("span", {}, tick);
    mark.style.setProperty("--at", Math.sqrt(tick));
    legend.append(mark);
  }
}

function makeTheme() {
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const show = () => (button.textContent = `Switch to ${isDark() ? "light" : "dark"} theme`);
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  show();
}

function makeFirstToken() {
  const box = byId("hide-first");
  box.addEventListener("change", () => {
    hidesFirst = box.checked;
    byId("hidden-first").hidden = !hidesFirst;
    redrawThumbnails();
    if (!headView.hidden) showHead(shown.head);
  });
}

// What the page shows: the checkpoint, its data, its loss.
function makeFacts() {
  byId("facts").hidden = !Object.keys(atlas.facts).length;
  const facts = Object.entries(atlas.facts).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), " ", element("dd", {}, value)),
  );
  byId("facts").append(...facts);
}

addEventListener("keydown", (event) => {
  if (headView.hidden || event.defaultPrevented || event.target.matches('[type="search"], [type="number"]')) return;
  if (event.key === "Escape") goBack();
  else if (event.shiftKey && event.key === "ArrowLeft") turn(-1);
  else if (event.shiftKey && event.key === "ArrowRight") turn(1);
  else return;
  event.preventDefault();
});
byId("back").addEventListener("click", goBack);
byId("previous").addEventListener("click", () => turn(-1));
byId("next").addEventListener("click", () => turn(1));
addEventListener("hashchange", () => {
  if (!isFramed) address = location.hash;
  route();
});

// How large the model is, and how long the texts are.
function extent() {
  const { queries, keys } = kinds.find((kind) => kind.isCross) ?? kinds[0];
  if (isPair) {
    const parts = kinds.map((kind) => `${ofKind(kind).length} ${kind.name}`);
    const tokens = [count(keys.length, "source token"), count(queries.length, "target token")];
    return `${count(heads.length, "head")} (${parts.join(", ")}), ${tokens.join(", ")}`;
  }
  return [count(byLayer().size, "layer"), count(heads.length, "head"), count(keys.length, "token")].join(", ");
}

byId("extent").textContent = extent();
for (const part of document.querySelectorAll('[data-needs="pair"]')) part.hidden = !isPair;
makeTheme();
makeFacts();
makeFirstToken();
makeLegend();
makeOverview();
makeHeadView();
makeEvents();
makeFilm();
route();
