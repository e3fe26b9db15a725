// The planner's page: answers that `zero-study advise` gave beforehand, a script for each model, loaded when it is chosen.
"use strict";
{
  const form = document.getElementById("asked");
  const out = document.getElementById("answered");
  const loaded = {};
  const loading = new Set();
  const value = (name) => form.elements.namedItem(name).value; // "length" is what elements have of their own

  window.planned = (content) => { loaded[content.model] = content.answers; show(); };

  function load(model) {
    out.textContent = "Loading the answers for this model ...";
    if (loading.has(model)) return;
    loading.add(model);
    const script = document.createElement("script");
    script.src = `${form.dataset.folder}/${encodeURIComponent(model)}.js`;
    script.onerror = () => {
      loading.delete(model); // the next input tries again
      script.remove();
      if (value("model") === model) out.textContent = `The answers for ${model} could not be loaded from ${script.src}.`;
    };
    document.head.append(script);
  }

  function element(name, text, parent, kind) {
    const made = document.createElement(name);
    made.textContent = text;
    if (kind) made.className = kind;
    parent.append(made);
    return made;
  }

  function table(rows) {
    const made = document.createElement("table");
    const head = made.createTHead().insertRow();
    for (const name of ["strategy", "fits", "GiB a GPU", "batch", "s/step", "tokens/s a GPU", "MFU"]) {
      const cell = element("th", name, head);
      cell.scope = "col";
    }
    const body = made.createTBody();
    const fastest = Math.max(...rows.map((row) => row[11]));
    for (const [name, , fits, needs, , micro, accumulation, checkpointed, step, low, high, speed, mfu] of rows) {
      const line = body.insertRow();
      if (!fits) line.className = "missing";
      element("th", name, line).scope = "row";
      element("td", fits ? "yes" : "no", line);
      element("td", needs, line, "number");
      element("td", `${micro} x ${accumulation}${checkpointed ? " c" : ""}`, line);
      element("td", `${step} (${low} to ${high ?? "?"})`, line, "number");
      const cell = element("td", speed.toLocaleString("en-US"), line, "number barred");
      cell.style.setProperty("--share", `${(100 * speed) / fastest}%`);
      element("td", `${mfu} %`, line, "number");
    }
    const scroll = document.createElement("div");
    scroll.className = "table";
    scroll.append(made);
    return scroll;
  }

  function show() {
    const count = Number(value("gpus"));
    form.elements.network.disabled = count <= 8;
    const answers = loaded[value("model")];
    if (!answers) return load(value("model"));
    const network = count > 8 ? value("network") : "";
    const found = answers[[value("gpu"), count, value("length"), value("batch"), network].join("|")];
    out.replaceChildren();
    const command = `zero-study advise --model ${value("model")} --gpu ${value("gpu")} --gpus ${count} --sequence-length `
      + `${value("length")} --global-batch-size ${value("batch") * count}${network ? ` --network-gbps ${network}` : ""}`;
    if (found.why) {
      element("p", `No answer: ${found.why}.`, out);
    } else {
      element("p", `Predicted, not measured. Recommended: ${found.reason}.`, out, "lead");
      out.append(table(found.rows));
      element("p", "batch: micro batch x accumulation, c: activation checkpointing. In parentheses: an interval made of "
        + "nine of ten published times of that kind; how often such a one held for others stands under \"How far can one "
        + "trust it?\". No upper end where launching kernels may bound short steps.",
        out, "note");
    }
    element("pre", command, out);
  }

  form.hidden = false; // and nothing is loaded before somebody asks
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => { event.preventDefault(); show(); });
}
