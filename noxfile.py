"""Every job of this repository: `nox -l` lists them; start with `nox -s demo`, `nox -s tests`."""

import os
import tempfile
from pathlib import Path

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
    """Run the doctests, the code blocks of README and docs, and build the site in site/."""
    install(session, ".[all]", "docs")
    session.run("pytest", "--doctest-modules", "distft", *session.posargs, env=CPU)
    session.run("pytest", "docs", *session.posargs, env=CPU)
    # Its theme prints an advertisement for a successor otherwise.
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def package(session: nox.Session) -> None:
    """Build wheel and sdist; install each into an empty environment and run the demo from it."""
    built = Path(session.create_tmp()).resolve()
    install(session, None, "package")
    session.run("python", "-m", "build", "--outdir", str(built))
    for archive in (max(built.glob("*.whl")), max(built.glob("*.tar.gz"))):
        place = Path(tempfile.mkdtemp(dir=built))
        session.run("python", "-m", "venv", str(place / "venv"))
        python = place / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
        wanted = ("-c", "constraints.txt", f"{archive}[deepspeed,plot]")
        session.run(str(python), "-m", "pip", "install", "--quiet", *wanted, external=True)
        with session.chdir(place):
            # Outside of the tree, so that nothing but the archive is imported.
            demo = ("demo", "--strategy", "fsdp2", "--strategy", "zero3", "--steps", "6")
            for command in (("plan", "Qwen3-8B"), demo):
                session.run(str(python), "-m", "distft", *command, env=CPU, external=True)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the tests of one process and print which lines they miss; ranks are not counted."""
    install(session, ".[all]", "coverage")
    paths = ("tests/unit", "tests/property")
    wanted = ("--cov=distft", "--cov-report=term:skip-covered")
    session.run("pytest", "-m", "not slow and not gpu", *wanted, *paths, env=CPU)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the import, memory of loads and conversions, a step against one written by hand."""
    install(session, ".[all]", "bench")
    session.run("python", "benchmarks/import_time.py", env=CPU)
    session.run("python", "benchmarks/load.py", env=CPU)
    session.run("python", "benchmarks/chunks.py", env=CPU)
    session.run("python", "benchmarks/step.py", *session.posargs, env=CPU)
    session.run("python", "benchmarks/trainer.py", env=CPU)
    session.run("python", "benchmarks/parity.py", env=CPU)
