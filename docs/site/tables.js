// Narrow screens show each row of a table as a block, in which the cells have the names of their columns (tables.css).
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.docutils")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    if (names.length < 3) continue;
    table.classList.add("labelled");
    if (names.length > 7) table.classList.add("many");
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, index) => {
        if (cell.textContent.trim()) cell.dataset.column = names[index];
      });
  }
});
