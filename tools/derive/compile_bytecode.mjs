// Compile the modules of a zip file to bytecode of pyodide's Python, so that a browser does not have to do it.
//
//     node tools/derive/compile_bytecode.mjs PYODIDE_FOLDER INPUT.zip OUTPUT.zip
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { resolve } from "node:path";

const [folder, input, output] = process.argv.slice(2).map((path) => resolve(path));
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide.mjs`));
const python = await loadPyodide({ indexURL: `${folder}/` });
python.FS.writeFile("/input.zip", readFileSync(input));
python.runPython(`
import zipfile
from importlib._bootstrap_external import _code_to_hash_pyc
from importlib.util import source_hash

with zipfile.ZipFile("/input.zip") as sources, zipfile.ZipFile("/output.zip", "w", zipfile.ZIP_DEFLATED) as target:
    for entry in sources.infolist():
        name, content = entry.filename, sources.read(entry)
        if name.endswith(".py"):
            code = compile(content, name, "exec", dont_inherit=True)
            name, content = f"{name}c", _code_to_hash_pyc(code, source_hash(content), checked=False)
        target.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
`);
writeFileSync(output, python.FS.readFile("/output.zip"));
