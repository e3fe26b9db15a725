// The page "Choose a strategy in the browser": read the form, ask the worker, show its answer.
// All numbers and sentences come from the Python program in the worker.

const FOLDER = new URL(".", import.meta.url);
const PARTS = ["parameters", "gradients", "optimizer states", "communication buffers", "gathered parameters",
  "activations and logits", "temporary buffers", "allocator"];
const LONGEST_BAR = 1.6; // in multiples of a GPU's memory; longer bars are cut
const DELAY = 30; // milliseconds without a change of the form, after which the question is asked
const LOADING = "This page is loading its program (19 MB, or 12 MB if the server compresses it).";
const SLOW = 1000; // milliseconds without an answer, after which the page says what it waits for

const form = document.getElementById("question");
const statusLine = document.getElementById("status");
const answerArea = document.getElementById("answer");
const fields = [...form.elements].filter((element) => element.name);
const labels = Object.fromEntries(fields.map((field) => [field.name, field.labels[0].firstChild.textContent.trim()]));
let defaults = {}; // of fields that are not empty by default
let first = null; // the question that the page shows first, and its answer, which needs no program

// ------------------------------------------------------------------ small helpers

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// `text` is a function that returns the text, or a promise of it. If the browser does not allow copying, the text is
// selected in the element `place`, so that the reader can copy it.
function copyButton(label, text, place) {
  const button = element("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    const copied = await text();
    try {
      await navigator.clipboard.writeText(copied);
      button.textContent = "Copied";
    } catch {
      if (place.hidden) place.replaceChildren(copied);
      place.hidden = false;
      getSelection().selectAllChildren(place);
      button.textContent = "The browser did not copy. The text is selected: copy it with Ctrl+C";
    }
    setTimeout(() => { button.textContent = label; }, 5000);
  });
  const around = element("div", {}, button);
  if (!place.isConnected && place.hidden) around.append(place);
  return around;
}

// ------------------------------------------------------------------ the question in the form and in the address

// Options of the command that the form does not have. They come from the address, and the program checks them.
let otherOptions = {};

function question() {
  const filledIn = fields.map((field) => [field.name, field.value.trim()]).filter(([, value]) => value);
  const values = { ...otherOptions, ...Object.fromEntries(filledIn) };
  const config = values.config || null;
  delete values.config;
  if (config !== null) delete values.model;
  if (values.stack === defaults.stack) delete values.stack;
  return { values, config };
}

// An option of the address that has no value is a flag, such as --compile. The form's field of a flag has the value "yes".
function words({ values }) {
  return Object.entries(values).flatMap(([name, value]) => (value && value !== "yes" ? [`--${name}`, value] : [`--${name}`]));
}

// In the address, a configuration is base64, because the theme of the site cannot read an address with quotation marks.
function encode(config) {
  const characters = Array.from(new TextEncoder().encode(config), (byte) => String.fromCharCode(byte));
  return btoa(characters.join("")).replaceAll("+", "-").replaceAll("/", "_");
}

function decode(text) {
  try {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (character) => character.charCodeAt(0));
    return new TextDecoder().decode(bytes);
  } catch {
    return text; // not written by this page; the program says what is wrong with it
  }
}

function writeAddress() {
  const { values, config } = question();
  const given = { ...values, ...(config === null ? {} : { config: encode(config) }) };
  try {
    history.replaceState(null, "", `#${new URLSearchParams(given)}`);
  } catch {
    // The configuration is too long for an address, or the browser limits how often the address may change.
  }
}

// The other addresses with a # lead to a heading of the page.
function isQuestion(address) {
  return address.includes("=");
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const values = isQuestion(location.hash) ? Object.fromEntries(given) : { ...first.question };
  if (values.config) values.config = decode(values.config);
  const names = fields.map((field) => field.name);
  otherOptions = Object.fromEntries(Object.entries(values).filter(([name]) => !names.includes(name)));
  for (const field of fields) {
    const value = values[field.name] ?? "";
    // A value that the form does not offer is kept, so that the program can say what is wrong with it.
    if (field instanceof HTMLSelectElement && ![...field.options].some((option) => option.value === value)) {
      field.add(new Option(value, value));
    }
    field.value = value || (defaults[field.name] ?? "");
    if (isFlag(field) && field.name in values) field.value = "yes"; // the value in the address may be empty
    if (field.value !== (defaults[field.name] ?? "")) unfold(field);
  }
  // Beside the answer, there is space for the usual settings. On a phone, they are folded, so that the answer follows.
  if (matchMedia("(min-width: 60em)").matches) document.getElementById("usual").open = true;
}

function isFlag(field) {
  return field instanceof HTMLSelectElement && field.options[1]?.value === "yes";
}

// Open the parts of the form in which a field is.
function unfold(field) {
  for (let part = field.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
}

// Put options such as "--lora-rank 16 --load-in-4bit" into the form, and ask again.
function apply(options) {
  for (const [, name, value] of options.matchAll(/--([a-z0-9-]+)(?: ([^\s-]\S*))?/g)) {
    const field = fields.find((each) => each.name === name);
    if (field) field.value = value ?? "yes";
    else otherOptions[name] = value ?? "";
    if (field) unfold(field);
  }
  ask();
  statusLine.scrollIntoView({ block: "center" });
}

function fillForm(choices) {
  const models = document.getElementById("models");
  for (const { name, hub_ids } of choices.models) {
    models.append(element("option", { value: name }, hub_ids.join(", ")));
  }
  const gpus = document.getElementById("gpu");
  for (const gpu of choices.gpus) gpus.add(new Option(`${gpu.name} (${gpu.GiB} GiB)`, gpu.name));
  for (const [flag, values] of Object.entries(choices.options)) {
    const select = document.getElementById(flag); // null if the form does not have this option
    for (const value of select === null ? [] : values) select.add(new Option(value, value));
  }
  defaults = { stack: choices.options.stack[0] };
  first = choices.first;
}

// ------------------------------------------------------------------ asking

const worker = new Worker(new URL("worker.js", FOLDER), { type: "module" });
let asked = 0; // number of the newest question
let waiting = null; // a question that is asked when the worker has answered the one before
let current = null; // the question that the worker answers
let isReady = false; // whether the worker has loaded its program
let isBroken = false; // whether a file did not load, so that there will be no answers
let timer = null;
let slowTimer = null;
let receiveJson = null; // called with the answer as JSON, which is computed when it is wanted

function ask() {
  if (isBroken) return;
  const { config, ...given } = question();
  waiting = { kind: "answer", number: ++asked, words: words(given), config, labels };
  writeAddress();
  if (config === null && String(waiting.words) === String(words({ values: first.question }))) {
    show(first.answer, waiting);
    waiting = null;
    return;
  }
  statusLine.parentElement.classList.add("outdated");
  clearTimeout(slowTimer);
  slowTimer = setTimeout(sayWhy, SLOW);
  send();
}

// Replace the old recommendation by what the page waits for.
function sayWhy() {
  statusLine.className = "";
  statusLine.textContent = isReady ? "Predicting ..." : LOADING;
}

function send() {
  if (current !== null || waiting === null) return;
  current = waiting;
  waiting = null;
  worker.postMessage(current);
}

function answerAsJson({ words, config }) {
  return new Promise((resolve) => {
    receiveJson = (content) => resolve(JSON.stringify(content, null, 1));
    worker.postMessage({ kind: "json", number: 0, words, config });
  });
}

worker.onmessage = ({ data }) => {
  if (data.ready) {
    isReady = true;
  } else if (data.missing) {
    fail(data.missing);
  } else if (data.kind === "json" && data.content) {
    receiveJson(data.content);
  } else {
    const answered = current;
    if (data.kind === "answer") current = null;
    if (data.failure) {
      show({ refusal: `The program of this page failed. Please report this with the address of the page: ${data.failure}` });
    } else if (data.number === asked) {
      show(data.content, answered);
      statusLine.dataset.seconds = data.seconds.toFixed(3);
    }
    send();
  }
};
worker.onerror = (event) => fail(event.message || "worker.js");

// Show that a file is missing, without which the page cannot answer. Later messages are consequences of the first one.
function fail(reason) {
  if (isBroken) return;
  isBroken = true;
  show({ refusal: `This page cannot answer, because a part of it did not load: ${reason}. Load the page again.` });
}

form.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(ask, DELAY);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(timer);
  ask();
});
addEventListener("hashchange", () => {
  clearTimeout(timer);
  if (isQuestion(location.hash)) {
    readAddress();
    ask();
  } else {
    writeAddress(); // a link to a heading: the question stays
  }
});

// ------------------------------------------------------------------ showing the answer

// The status line is the part that screen readers read aloud: the recommendation, or why there is none.
function show(content, shown) {
  clearTimeout(slowTimer);
  statusLine.parentElement.classList.remove("outdated");
  statusLine.className = "refusal" in content ? "refusal" : "recommendation";
  statusLine.dataset.number = asked;
  if ("refusal" in content) {
    statusLine.textContent = content.refusal;
    answerArea.replaceChildren();
    return;
  }
  // The first sentence is what to do. A period in a number is followed by a digit.
  const [, first, others] = content.answer.match(/^(.*?\.)( .*|)$/s) ?? [null, content.answer, ""];
  statusLine.replaceChildren(element("strong", {}, first), others);
  answerArea.replaceChildren(
    element("p", {}, [`${content.setting}. Predicted, not measured.`, ...content.trained].join(" ")),
    ...(content.training ? [element("p", {}, content.training)] : []),
    ...changes(content),
    ...content.notes.map((note) => element("p", {}, `Note: ${note}.`)),
    ...strategies(content),
    ...start(content),
    ...evidence(content),
    ...assumed(content),
    copyButton("Copy the answer as JSON", () => answerAsJson(shown), element("pre", { hidden: true, tabindex: "0" })),
  );
}

// Changes of the training with which it fits: the options that request each of them, and what is predicted then. If
// nothing fits, LoRA and QLoRA are among them, also if they do not fit either.
function changes({ change, changes = [], adapters = [] }) {
  const parts = change ? [useButton(change.options, `Use ${change.words}`)] : [];
  const list = (title, entries) => entries.length ? [element("p", {}, title), element("ul", { class: "changes" },
    ...entries.map(({ options, words, predicted }) => element("li", {}, element("b", {}, words), `: ${predicted} `,
      useButton(options, "Use this"))))] : [];
  return [...parts, ...list("Changes that help:", changes),
    ...list("Training an adapter needs less memory (LoRA; QLoRA also keeps the frozen weights in four bits):", adapters)];
}

function useButton(options, label) {
  const button = element("button", { type: "button", "data-options": options }, label);
  button.addEventListener("click", () => apply(options));
  return button;
}

// One row for each strategy, or for each number of GPUs if it was asked how many are needed.
function strategies(content) {
  if (content.strategies.length === 0) return [];
  const needed = content.strategies.map((strategy) => strategy.needed_bytes);
  const widest = Math.max(content.capacity.bytes, Math.min(Math.max(...needed), LONGEST_BAR * content.capacity.bytes));
  const isShown = ({ name }) => content.shown?.includes(name) ?? true;
  const slowest = Math.max(...content.strategies.filter((strategy) => isShown(strategy) && strategy.fits)
    .map((strategy) => strategy.seconds[2] ?? strategy.seconds[1]), 0);
  const rows = content.strategies.map((strategy, place) => row(strategy, content, content.machines?.[place], widest, slowest));
  const hidden = rows.filter((_, place) => !isShown(content.strategies[place]));
  for (const item of hidden) item.hidden = true;
  const parts = PARTS.filter((part) => content.strategies.some((strategy) => strategy.parts[part] > 0.002 * widest));
  const legend = element("ul", { class: "legend" }, ...parts.map((part) =>
    element("li", {}, element("i", { class: partClass(part) }), partName(part))));
  const all = element("button", { type: "button", "aria-expanded": "false" }, `Show ${hidden.length} more strategies`);
  all.addEventListener("click", () => {
    const isOpen = all.getAttribute("aria-expanded") === "true";
    for (const item of hidden) item.hidden = isOpen;
    all.setAttribute("aria-expanded", String(!isOpen));
    all.textContent = isOpen ? `Show ${hidden.length} more strategies` : "Show fewer strategies";
  });
  const leftOut = Object.entries(content.why_not ?? {})
    .filter(([name]) => !content.strategies.some((strategy) => strategy.name === name))
    .map(([name, reason]) => element("p", { class: "why" }, `${name}: ${reason}.`));
  return [
    element("h2", { id: "strategies" }, `Memory of one GPU by ${content.machines ? "number of GPUs" : "strategy"} (predicted)`),
    element("details", { class: "key" }, element("summary", {}, "What the colors and lines mean"), legend,
      element("p", { class: "why" }, `The dashed line is the memory that a program can use: ${content.capacity.text} of each GPU. `
        + "If a bar ends in an arrow, the strategy needs more memory than the bar can show. The thin line below a bar is the interval of the predicted step time, and its mark is the predicted time. An arrow instead of the mark means that the step takes longer than the line can show. "
        + content.legend.join(" "))),
    element("ul", { class: "strategies" }, ...rows),
    ...leftOut,
    ...(hidden.length ? [all] : []),
  ];
}

function partName(part) {
  return part === "allocator" ? "margin for the allocator" : part;
}

function partClass(part) {
  return `part-${part.replaceAll(" ", "-")}`;
}

// The interval of the step time as a line with a mark. The axis ends at the slowest time of the strategies that fit and
// are shown first. An arrow replaces the mark of a strategy that is even slower.
function timeBar({ seconds: [low, predicted, high] }, slowest) {
  const percent = (seconds) => 100 * Math.min(1, seconds / slowest);
  return element("div", { class: predicted > slowest ? "time cut" : "time", "aria-hidden": "true" },
    element("span", { class: "interval", style: `left: ${percent(low)}%; width: ${percent(high ?? slowest) - percent(low)}%` }),
    element("span", { class: "mark", style: `left: ${percent(predicted)}%` }));
}

function row(strategy, { capacity, recommended, why_not = {} }, machine, widest, slowest) {
  const { name, cells } = strategy;
  const share = (bytes) => `${100 * bytes / widest}%`;
  const inWords = PARTS.filter((part) => strategy.parts[part] > 0)
    .map((part) => `${partName(part)} ${(strategy.parts[part] / 2 ** 30).toFixed(1)} GiB`).join(", ");
  const isCut = strategy.needed_bytes > widest;
  const bar = element("div", { class: isCut ? "bar cut" : "bar", role: "img", title: inWords,
    "aria-label": `${cells.GiB} GiB of ${capacity.text}: ${inWords}` },
  ...PARTS.map((part) => element("span", { class: partClass(part), style: `width: ${share(strategy.parts[part])}` })),
  element("span", { class: "capacity", style: `left: ${share(capacity.bytes)}` }));
  const numbers = [
    ["needs", `${cells.GiB} GiB`], ["free", `${cells.free} GiB`], ["fits", cells.fits], ["batch", cells.batch],
    ["s/step", cells["s/step"]],
    ...("images/s/GPU" in cells
      ? [["images/s per GPU", cells["images/s/GPU"]], ["$ per 1e6 images", cells["$/1e6 images"]]]
      : [["tokens/s per GPU", cells["tokens/s/GPU"]], ["$ per 1e9 tokens", cells["$/1e9 tok"]]]),
    ...(cells["host GiB"] ? [["host GiB per node", cells["host GiB"]]] : []),
    ...(cells["disk GiB"] ? [["disk GiB per node", cells["disk GiB"]]] : []),
  ];
  const details = [...(machine ? [cells.strategy] : []), cells.precision, ...(name === recommended ? ["recommended"] : [])];
  return element("li", { class: strategy.fits ? "" : "no-fit", "data-strategy": name },
    element("div", { class: "name" }, machine ? `${machine.num_gpus} x ${machine.gpu}` : cells.strategy,
      element("small", {}, details.join(", "))),
    bar,
    ...(strategy.fits ? [timeBar(strategy, slowest)] : []),
    element("p", { class: "numbers" }, ...numbers.map(([label, text]) =>
      element("span", { "data-column": label }, `${label} `, element("b", {}, text)))),
    ...(why_not[name] ? [element("p", { class: "why" }, `Why not: ${why_not[name]}.`)] : []),
    ...(machine ? [useButton(`--gpus ${machine.num_gpus}`, `Show ${machine.num_gpus} x ${machine.gpu}`)] : []));
}

function start({ launch, no_launch, command }) {
  const parts = [element("h2", { id: "start" }, "Start the training")];
  if (launch) {
    parts.push(...code("The command", launch.command));
    for (const [name, text] of Object.entries(launch.files)) parts.push(...code(name, text));
    if (launch.settings.length) {
      parts.push(element("p", {}, "The program also needs:"),
        element("ul", {}, ...launch.settings.map((setting) => element("li", {}, setting))));
    }
  } else {
    parts.push(element("p", {}, no_launch ?? "There is no launch command, because no strategy fits."));
  }
  return [...parts, ...code("The same question in a terminal", command)];
}

function code(label, text) {
  const place = element("pre", {}, element("code", {}, text));
  return [
    element("p", {}, `${label}:`),
    place,
    copyButton(`Copy ${label[0].toLowerCase()}${label.slice(1)}`, () => text, place),
  ];
}

function evidence({ evidence }) {
  if (!evidence) return [];
  const { strategy, memory, time } = evidence;
  return [
    element("h2", { id: "evidence" }, "How accurate such predictions are, compared with published measurements"),
    element("dl", {},
      element("dt", {}, `memory of ${strategy}`), element("dd", {}, `${memory}.`),
      element("dt", {}, `time of ${strategy}`), element("dd", {}, `${time}.`)),
    element("p", {}, element("a", { href: new URL("../../reports/planner-accuracy/", FOLDER).href },
      "All comparisons with measurements")),
  ];
}

function assumed({ assumed: pairs }) {
  return [element("details", {}, element("summary", {}, "What is assumed"),
    element("dl", {}, ...Object.entries(pairs).flatMap(([label, value]) => [element("dt", {}, label), element("dd", {}, value)])))];
}

// ------------------------------------------------------------------ start

// With a keyboard, one can type a model at once. On a phone, the keyboard would cover the answer. The field is put into
// the page again, because the browser focuses the first element with this attribute, of which the theme has one, too.
const hasKeyboard = matchMedia("(hover: hover) and (pointer: fine)").matches;
if (hasKeyboard) {
  form.elements.model.autofocus = true;
  form.elements.model.labels[0].append(form.elements.model);
}
sayWhy();
try {
  const response = await fetch(new URL("choices.json", FOLDER));
  if (!response.ok) throw new Error(`HTTP status ${response.status}`);
  fillForm(await response.json());
  readAddress();
  ask();
  if (hasKeyboard) form.elements.model.select();
} catch (error) {
  fail(`choices.json (${error.message})`);
}
