// Thumbnails of all heads, ordered by layer or by a measure.

const ORDERS = {
  layers: "by layer and head",
  smallest: "smallest first",
  largest: "largest first",
};

const thumbnails = byId("thumbnails");
const measureChoice = byId("measure");
const orderChoice = byId("order");

const drawWhenSeen = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      drawMap(target.querySelector("canvas"), heads[target.dataset.head]);
      drawWhenSeen.unobserve(target);
    }
  },
  { rootMargin: "400px" },
);

function makeThumbnail(head, index) {
  const canvas = element("canvas", { "aria-hidden": "true", width: 1, height: 1 });
  const place = element("span", { class: "place" });
  place.append(element("span", {}, `layer ${head.layer}`), " ", element("span", {}, `head ${head.name}`));
  const button = element("button", { type: "button", class: "thumbnail", tabindex: -1, "data-head": index });
  button.append(canvas, place, " ", element("span", { class: "value" }));
  button.addEventListener("click", () => openHead(head));
  drawWhenSeen.observe(button);
  return button;
}

// The heads in the chosen order; heads without a defined measure come last.
function ordered() {
  const measure = measureChoice.selectedIndex;
  const sign = { smallest: 1, largest: -1 }[orderChoice.value];
  if (!sign) return [...heads];
  const value = (head) => head.values[measure] ?? sign * Infinity;
  return [...heads].sort((a, b) => (value(a) === value(b) ? 0 : sign * (value(a) - value(b))));
}

const byLayer = () => Map.groupBy(heads, (head) => head.layer);

function arrange() {
  const buttons = ordered().map((head) => head.button);
  const isSorted = orderChoice.value !== "layers" && measures.length > 0;
  thumbnails.classList.toggle("sorted", isSorted);
  if (isSorted) return thumbnails.replaceChildren(...buttons);
  thumbnails.replaceChildren(
    ...[...byLayer()].map(([layer, row]) =>
      element("div", { class: "layer" }, element("h3", {}, `Layer ${layer}`), ...row.map((head) => head.button)),
    ),
  );
}

function showValues() {
  if (!measures.length) return;
  const { name, description } = measures[measureChoice.selectedIndex];
  byId("measure-description").textContent = description;
  for (const head of heads) {
    const value = shownNumber(head.values[measureChoice.selectedIndex]);
    head.button.querySelector(".value").replaceChildren(element("span", { class: "unseen" }, `${name} `), value);
  }
}

// The button in the row above or below that is nearest to the same column.
function vertically(direction, at, buttons) {
  const box = (button) => button.getBoundingClientRect();
  const here = box(buttons[at]);
  const beyond = buttons.filter((other) => direction * (box(other).top - here.top) > 1);
  if (!beyond.length) return at;
  const row = direction > 0 ? beyond[0] : beyond.at(-1);
  const inRow = beyond.filter((other) => Math.abs(box(other).top - box(row).top) <= 1);
  const offset = (other) => Math.abs(box(other).left - here.left);
  return buttons.indexOf(inRow.reduce((best, other) => (offset(other) < offset(best) ? other : best)));
}

const MOVES = {
  ArrowLeft: (at) => at - 1,
  ArrowRight: (at) => at + 1,
  ArrowUp: (at, buttons) => vertically(-1, at, buttons),
  ArrowDown: (at, buttons) => vertically(1, at, buttons),
  Home: () => 0,
  End: () => Infinity,
};

function makeOverview() {
  byId("text").append(...tokens.flatMap((token) => [element("bdi", {}, token), ...lineEnd(token)]));
  thumbnails.classList.toggle("fine", size > 128);
  const columns = Math.max(...[...byLayer().values()].map((row) => row.length));
  thumbnails.style.setProperty("--columns", columns);
  heads.forEach((head, index) => (head.button = makeThumbnail(head, index)));
  heads[0].button.tabIndex = 0;
  for (const { name } of measures) measureChoice.append(element("option", { value: name }, name));
  for (const [value, words] of Object.entries(ORDERS)) orderChoice.append(element("option", { value }, words));
  for (const control of document.querySelectorAll('[data-needs="measures"]')) control.hidden = !measures.length;
  rove(thumbnails, (key, at, buttons) => MOVES[key]?.(at, buttons));
  for (const control of [measureChoice, orderChoice]) {
    control.addEventListener("change", () => {
      showValues();
      arrange();
      const measure = orderChoice.value === "layers" ? "" : `${measureChoice.value}, `;
      byId("sorted").textContent = `Heads in order: ${measure}${ORDERS[orderChoice.value]}.`;
    });
  }
  showValues();
  arrange();
}
