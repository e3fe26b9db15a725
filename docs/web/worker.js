// Run the planner: load Python and the program, then answer one question after another.
import { loadPyodide } from "./python/pyodide.mjs";

const PROGRAM = "/lib/planner";

// Pyodide does not report every file that it could not load, and it waits forever for some of them.
const fetchFile = self.fetch.bind(self);
self.fetch = async (address, options) => {
  try {
    const response = await fetchFile(address, options);
    if (!response.ok) throw new Error(`HTTP status ${response.status}`);
    return response;
  } catch (error) {
    postMessage({ missing: `${String(address.url ?? address).split("/").pop()} (${error.message})` });
    throw error;
  }
};

async function load() {
  const program = fetch("./python/program.zip").then((response) => response.arrayBuffer());
  const python = await loadPyodide({ indexURL: new URL("./python/", import.meta.url).href });
  python.unpackArchive(await program, "zip", { extractDir: PROGRAM });
  return python.runPython(`
import sys
sys.path.insert(0, "${PROGRAM}")
import json
from zero_study.cli import web

def answer(kind, words, config, labels):
    words = words.to_py()
    return json.dumps(web.as_json(words, config) if kind == "json" else web.answer(words, config, labels.to_py()))
answer
`);
}

const loaded = load();
loaded.then(
  () => postMessage({ ready: true }),
  (error) => postMessage({ missing: error.message ?? "Python" }),
);

// Questions of the kind "answer" get what the page shows; those of the kind "json" get what the command's --json prints.
onmessage = async ({ data: { kind, number, words, config, labels } }) => {
  const answer = await loaded.catch(() => null); // the failure was already reported
  if (answer === null) return;
  const begin = performance.now();
  try {
    const content = JSON.parse(answer(kind, words, config ?? undefined, labels));
    postMessage({ kind, number, content, seconds: (performance.now() - begin) / 1000 });
  } catch (error) {
    postMessage({ kind, number, failure: String(error) });
  }
};
