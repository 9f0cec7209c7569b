"use strict";
// What moved: filter, search, and both answers side by side. Texts are put in as text, never as markup.
(() => {
  const { kinds, sides, rows } = JSON.parse(document.getElementById("moved-data").textContent);
  const list = document.getElementById("moved-list"), told = document.getElementById("moved-told");
  const more = document.getElementById("moved-more"), search = document.getElementById("moved-search");
  const chips = [...document.querySelectorAll("[data-kind]")];
  const STEP = 5;
  let kind = "", limit = STEP;

  const make = (tag, text, parent, name) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (name) made.className = name;
    parent.append(made);
    return made;
  };

  const article = row => {
    const card = document.createElement("article");
    make("h3", kinds[row.kind] + (row.category ? ` · ${row.category}` : ""), card, row.good === undefined ? "" : row.good ? "holds" : "broken");
    make("pre", row.prompt, card);
    if (row.answer) make("p", `Right answer: ${row.answer}`, card, "soft");
    const both = make("div", "", card, "sides");
    for (const [side, name] of sides.entries()) {
      const half = make("div", "", both);
      make("h4", `${name}: ${row.marks[side]}`, half);
      make("pre", row.texts[side] || "(empty)", half);
    }
    return card;
  };

  const show = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter(row => (kind === "" || row.kind === Number(kind))
      && words.every(word => [row.prompt, row.answer, row.category, ...row.texts].some(text => text.toLowerCase().includes(word))));
    list.replaceChildren(...found.slice(0, limit).map(article));
    told.textContent = `${Math.min(limit, found.length)} of ${found.length} shown`;
    more.hidden = found.length <= limit;
    for (const chip of chips) chip.setAttribute("aria-pressed", String(chip.dataset.kind === kind));
  };

  for (const chip of chips) chip.addEventListener("click", () => { kind = chip.dataset.kind; limit = STEP; show(); });
  search.addEventListener("input", () => { limit = STEP; show(); });
  more.addEventListener("click", () => { limit += 10 * STEP; show(); });
  document.getElementById("moved-controls").hidden = false;
  show();
})();
