// The page around the two views: routing, focus, legend and theme.

const overview = byId("overview");
const headView = byId("head");

// Whether the head was opened from its thumbnail, so that the browser's history leads back there.
let cameFromOverview = false;

function openHead(head) {
  cameFromOverview = true;
  location.hash = head.hash;
}

function goBack() {
  if (cameFromOverview) history.back();
  else location.hash = "#overview";
}

// The next or previous head in the order of the overview; it replaces this one in the browser's history.
function turn(by) {
  const order = ordered();
  const at = order.indexOf(shown.head) + by;
  // The whole URL, since within a frame a bare hash would be resolved against the outer page.
  location.replace(location.href.split("#")[0] + order[(at + order.length) % order.length].hash);
}

function route() {
  const head = heads.find((other) => other.hash === location.hash);
  const wasInHead = !headView.hidden;
  overview.hidden = Boolean(head);
  headView.hidden = !head;
  document.title = head ? `${head.label} · ${atlas.title}` : atlas.title;
  if (head) {
    if (head.kind !== chosenKind) showKind(head.kind);
    showHead(head);
    if (wasInHead) return;
    scrollTo(0, 0);
    byId("head-title").focus({ preventScroll: true });
  } else {
    cameFromOverview = false;
    if (wasInHead) shown.head.button.focus();
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
  const show = () => button.setAttribute("aria-pressed", isDark());
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  system.addEventListener("change", show);
  show();
}

addEventListener("keydown", (event) => {
  if (headView.hidden) return;
  if (event.key === "Escape") goBack();
  else if (event.shiftKey && event.key === "ArrowLeft") turn(-1);
  else if (event.shiftKey && event.key === "ArrowRight") turn(1);
  else return;
  event.preventDefault();
});
byId("back").addEventListener("click", goBack);
byId("previous").addEventListener("click", () => turn(-1));
byId("next").addEventListener("click", () => turn(1));
addEventListener("hashchange", route);

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
makeLegend();
makeOverview();
makeHeadView();
route();
