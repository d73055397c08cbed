"use strict";
// Figures are drawn when they come into view, in the colours of the page.

function colours() {
  const style = getComputedStyle(document.documentElement);
  return { ink: style.getPropertyValue("--ink").trim(), card: style.getPropertyValue("--card").trim() };
}

function draw(place) {
  const data = document.getElementById(`${place.dataset.part}-data-${place.dataset.figure}`);
  const figure = JSON.parse(data.textContent);
  const { ink, card } = colours();
  figure.layout.font = { ...figure.layout.font, color: ink };
  figure.layout.hoverlabel = { bgcolor: card, font: { color: ink } };
  for (const line of figure.layout.shapes || []) line.line = { ...line.line, color: ink };
  figure.layout.autosize = true;
  Plotly.react(place, figure.data, figure.layout, { responsive: true, displayModeBar: false });
  place.dataset.drawn = "true";
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) {
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  }
}, { rootMargin: "300px" });
document.querySelectorAll(".figure").forEach((place) => seen.observe(place));

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  document.querySelectorAll(".figure[data-drawn]").forEach(draw);
});

document.querySelectorAll(".choose").forEach((choice) => {
  choice.addEventListener("change", () => {
    const place = document.getElementById(choice.dataset.of);
    const [name, unit] = place.dataset.figure.split("_over_");
    const chosen = choice.dataset.role === "name" ? [choice.value, unit] : [name, choice.value];
    place.dataset.figure = chosen.filter(Boolean).join("_over_");
    draw(place);
  });
});

// Tables

const text = (cell) => cell.textContent.trim();
const value = (cell) => ("value" in cell.dataset ? Number(cell.dataset.value) : null);

function sort(table, column, descending) {
  const body = table.tBodies[0];
  const numbers = [...body.rows].some((row) => value(row.cells[column]) !== null);
  const sign = descending ? -1 : 1;
  const rows = [...body.rows].sort((a, b) => {
    if (!numbers) return sign * text(a.cells[column]).localeCompare(text(b.cells[column]));
    const [x, y] = [value(a.cells[column]), value(b.cells[column])];
    if (x === null || y === null) return (x === null) - (y === null); // unknown last, either way
    return sign * (x - y);
  });
  body.append(...rows);
}

document.querySelectorAll(".sortable").forEach((table) => {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      // A column of numbers begins with the greatest, one of words with the first.
      const numbers = [...table.tBodies[0].rows].some((row) => value(row.cells[column]) !== null);
      const before = head.getAttribute("aria-sort");
      const descending = before === "none" ? numbers : before === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sort(table, column, descending);
    });
  });
});

function count(table) {
  const rows = [...table.tBodies[0].rows];
  const shown = rows.filter((row) => !row.hidden).length;
  document.getElementById(`${table.id}-count`).textContent = `${shown} of ${rows.length} rows`;
}

document.querySelectorAll(".filter").forEach((input) => {
  const table = document.getElementById(input.dataset.table);
  count(table);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of table.tBodies[0].rows) {
      const of_row = `${text(row.cells[0])} ${text(row.cells[1])}`.toLowerCase();
      row.hidden = !words.every((word) => of_row.includes(word));
    }
    count(table);
  });
});

function csv(table) {
  const quoted = (cell) => `"${cell.replaceAll('"', '""')}"`;
  const line = (row) => [...row.cells].map((cell) => cell.dataset.value ?? (text(cell) === "–" ? "" : quoted(text(cell)))).join(",");
  const shown = [...table.tBodies[0].rows].filter((row) => !row.hidden);
  return [table.tHead.rows[0], ...shown].map(line).join("\n") + "\n";
}

document.querySelectorAll(".download").forEach((button) => {
  button.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csv(document.getElementById(button.dataset.table))], { type: "text/csv" }));
    link.download = button.dataset.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
});
