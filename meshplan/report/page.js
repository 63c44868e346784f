"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], first = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, place) => {
    const cell = row.cells[place], by = cell.dataset.by;
    return by === undefined ? cell.textContent : Number(by);
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
    : typeof a !== typeof b ? (typeof a === "number" ? -1 : 1)
    : a.localeCompare(b, "en", {numeric: true});
  heads.forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = {ascending: "descending", descending: null}[head.getAttribute("aria-sort")];
      const order = next === undefined ? "ascending" : next;
      heads.forEach(each => each.removeAttribute("aria-sort"));
      const rows = [...first];
      if (order) {
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        rows.sort((a, b) => sign * compare(key(a, place), key(b, place)));
      }
      body.append(...rows);
    });
  });
}
// A closed element would be missing on paper.
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
});
// A table that is wider than the page says so above its first row.
const hints = new ResizeObserver(entries => {
  for (const { target } of entries) {
    const box = target.closest(".scroll");
    box.previousElementSibling.hidden = box.scrollWidth <= box.clientWidth + 1;
  }
});
for (const box of document.querySelectorAll(".scroll")) {
  const hint = document.createElement("p");
  hint.className = "hint";
  hint.textContent = "Scroll the table sideways for more columns \u2192";
  hint.hidden = true;
  box.before(hint);
  hints.observe(box);
  hints.observe(box.firstElementChild);
}
