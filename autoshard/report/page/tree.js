// ---- tree
const folds = [...document.querySelectorAll(".tree details")];
byId("open-all").addEventListener("click", () => folds.forEach(fold => { fold.open = true; }));
byId("close-all").addEventListener("click", () => folds.forEach((fold, i) => { fold.open = i === 0; }));

// ---- module table: the third click gives the order of the model back
const table = byId("module-table");
const rows = [...table.tBodies[0].rows];
table.tHead.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  const head = button.parentElement, column = +button.dataset.sort, numeric = button.dataset.numeric === "1";
  const first = numeric ? "descending" : "ascending", second = numeric ? "ascending" : "descending";
  const before = head.getAttribute("aria-sort");
  const next = before === null ? first : before === first ? second : null;
  table.querySelectorAll("th").forEach(th => th.removeAttribute("aria-sort"));
  table.classList.toggle("sorted", next !== null);
  const order = [...rows];
  if (next !== null) {
    head.setAttribute("aria-sort", next);
    const sign = next === "ascending" ? 1 : -1;
    const key = row => numeric ? +row.cells[column].dataset.v : row.cells[column].textContent;
    order.sort((a, b) => sign * (numeric ? key(a) - key(b) : key(a).localeCompare(key(b), undefined, {numeric: true})));
  }
  table.tBodies[0].append(...order);
});
