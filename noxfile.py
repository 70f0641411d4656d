"""Every job of this repository: `nox -l` lists them; start with `nox -s demo`, `nox -s tests`."""

import nox

nox.needs_version = ">=2026.2"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
# What CI runs; the others are asked for by name.
nox.options.sessions = ["lint", "types", "tests"]

PROJECT = nox.project.load_toml("pyproject.toml")
# The same run on every machine: CPU and gloo, one thread per rank, no network. A visible GPU would
# make both torch and DeepSpeed choose it.
CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def install(session: nox.Session, package: str | None, *groups: str) -> None:
    """Install the package with its extras and dependency groups, at the pinned versions."""
    wanted = ["-e", package] if package else []
    wanted += nox.project.dependency_groups(PROJECT, *groups)
    session.install("-c", "constraints.txt", *wanted)


@nox.session
def demo(session: nox.Session) -> None:
    """Fine-tune one model under six strategies and compare them."""
    install(session, ".[deepspeed,plot]")
    session.run("python", "-m", "distft.demo", *session.posargs, env=CPU)


@nox.session
def tests(session: nox.Session) -> None:
    """All that needs no GPU and is not slow."""
    install(session, ".[all]", "test")
    session.run("pytest", "-m", "not slow and not gpu", *session.posargs, env=CPU)


@nox.session
def full(session: nox.Session) -> None:
    """All that needs no GPU."""
    install(session, ".[all]", "test")
    session.run("pytest", "-m", "not gpu", *session.posargs, env=CPU)


@nox.session
def gpu(session: nox.Session) -> None:
    """What needs CUDA devices; a test that wants more than there are is skipped with a reason."""
    install(session, ".[all]", "test")
    session.run("pytest", "-m", "gpu", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, spelling and the direction of imports."""
    install(session, None, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    session.run("lint-imports", "--no-cache")


@nox.session
def types(session: nox.Session) -> None:
    """Static types of the package (mypy, strict)."""
    install(session, ".[all]", "types")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Run the doctests, and the code blocks of README and docs."""
    install(session, ".[all]", "docs")
    session.run("pytest", "--doctest-modules", "distft", "docs", *session.posargs, env=CPU)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the import, memory of loads and conversions, a step against one written by hand."""
    install(session, ".[all]", "bench")
    session.run("python", "benchmarks/import_time.py", env=CPU)
    session.run("python", "benchmarks/load.py", env=CPU)
    session.run("python", "benchmarks/chunks.py", env=CPU)
    session.run("python", "benchmarks/step.py", *session.posargs, env=CPU)
    session.run("python", "benchmarks/trainer.py", env=CPU)
