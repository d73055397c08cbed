// Works the page as somebody would, and leaves what it found in <pre id=found>.
const errors = [];
addEventListener("error", (e) => errors.push(String(e.message)));
addEventListener("load", () => setTimeout(async () => {
  const found = {loaded_ms: performance.now()};
  const table = document.querySelector(".sortable");
  const column = (n) => [...table.tBodies[0].rows].filter((r) => !r.hidden).map((r) => r.cells[n].textContent.trim());
  const heads = table.tHead.rows[0].cells;
  heads[3].querySelector("button").click();
  found.descending = column(3); found.aria = heads[3].getAttribute("aria-sort");
  heads[3].querySelector("button").click();
  found.ascending = column(3);
  heads[0].querySelector("button").click();
  found.names = column(0);
  const filter = document.querySelector(".filter");
  filter.value = "BREAK 0.2"; filter.dispatchEvent(new Event("input"));
  found.filtered = column(0).concat(column(1));
  found.count = document.querySelector(".count").textContent;
  found.csv = csv(table);
  const place = document.getElementById("part0-curve");
  const title = () => place.layout && place.layout.xaxis.title.text;
  draw(place); found.before = title();
  const choice = [...document.querySelectorAll(".choose")].find((c) => c.dataset.role === "unit");
  choice.value = "hours"; choice.dispatchEvent(new Event("change"));
  found.after = title();
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  document.querySelectorAll(".figure").forEach(draw);
  found.empty = [...document.querySelectorAll(".figure")].filter((f) => !f.querySelector("svg")).length;
  found.ink = place.layout.font.color;
  found.paper = getComputedStyle(document.body).backgroundColor;
  found.unlabelled = [...document.querySelectorAll("input,select,button")]
    .filter((e) => !(e.labels && e.labels.length) && !e.textContent.trim()).length
    + [...document.querySelectorAll(".figure,.scroll,video")].filter((e) => !e.getAttribute("aria-label")).length;
  // Nothing is wider than the page, but in a frame of its own that scrolls.
  const frame = document.documentElement.clientWidth;
  found.wider = [...document.querySelectorAll("main *, header *")]
    .filter((e) => e.getBoundingClientRect().right > frame + 1 && !e.closest(".scroll, .figure, .hidden"))
    .map((e) => `${e.tagName}.${e.className} ${e.textContent.trim().slice(0, 40)}`);
  found.page_width = document.documentElement.scrollWidth - frame;
  found.dead = [...document.querySelectorAll('a[href^="#"]')]
    .map((a) => a.getAttribute("href").slice(1)).filter((id) => !document.getElementById(id));
  found.errors = errors;
  const said = document.createElement("pre"); said.id = "found"; said.textContent = JSON.stringify(found);
  document.body.append(said);
}, 0));
