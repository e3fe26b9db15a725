// Filters the list of a page by its form, and keeps what is asked in the address: page.html#source=x&verdict=differs.
(() => {
  const form = document.getElementById("filters");
  const shown = document.getElementById("shown");
  const list = document.getElementById("list");
  const entries = [...list.querySelectorAll("details[id]")];
  // What is searched: the name, the line, and the first two entries below it, which say why, and what to do or under which conditions.
  const texts = new Map(entries.map((entry) => {
    const parts = [...entry.querySelectorAll("summary, dd:nth-of-type(-n + 2)")].map((part) => part.textContent);
    return [entry, [entry.id, ...parts].join(" ").toLowerCase()];
  }));

  const asked = () => [...new FormData(form)].filter(([, value]) => value.trim());

  function show() {
    const tests = asked().map(([name, value]) => {
      if (name !== "words") return (entry) => entry.dataset[name] === value;
      const words = value.toLowerCase().split(/\s+/);
      return (entry) => words.every((word) => texts.get(entry).includes(word));
    });
    for (const entry of entries) entry.hidden = !tests.every((test) => test(entry));
    shown.textContent = `${entries.filter((entry) => !entry.hidden).length} of ${entries.length} sentences`;
  }

  function changed() {
    show();
    const fragment = new URLSearchParams(asked()).toString();
    history.replaceState(null, "", location.href.split("#")[0] + (fragment && `#${fragment}`));
  }

  // A fragment is a filter, or the name of an entry, which is then shown whatever the filter.
  function follow() {
    const fragment = location.hash.slice(1);
    if (fragment === "" || fragment.includes("=")) {
      const values = new URLSearchParams(fragment);
      for (const field of form.querySelectorAll("[name]")) {
        field.value = values.get(field.name) ?? "";
        if (field.selectedIndex === -1) field.value = "";
      }
      show();
      if (fragment) list.scrollIntoView();
      return;
    }
    const target = document.getElementById(fragment); // an entry, or a reading inside one
    const entry = entries.find((one) => one.contains(target));
    if (!entry) return;
    if (entry.hidden) shown.textContent += ", and the one that was linked to";
    entry.hidden = false;
    for (let fold = target; fold; fold = fold.parentElement.closest("details")) fold.open = true;
    entry.scrollIntoView();
    entry.querySelector("summary").focus({ preventScroll: true });
  }

  form.addEventListener("input", changed);
  form.addEventListener("reset", () => setTimeout(changed));
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", follow);
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (link && link.hash === location.hash) follow(); // again: the browser does not tell
  });
  form.hidden = false;
  show();
  follow();
})();
