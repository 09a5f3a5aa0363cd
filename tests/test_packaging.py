"""fusegen finds its templates from a bare checkout, from an editable install and from a wheel."""

import shutil
import stat
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE_NAMES = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "templates").rglob("*.*")
)
LAYOUTS = ("checkout", "editable", "wheel")
STEP_TIMEOUT_S = 60

# `python -S` leaves out the environment's own site directory, and with it the editable install of
# this very repository; the layout under test goes in first, then the libraries, as a plain path
# whose .pth files are ignored.
AS_MODULE = """
import runpy, site, sys
layout, libraries, *sys.argv = sys.argv[1:]
site.addsitedir(layout)
sys.path.append(libraries)
import fusegen
print(fusegen.__file__, fusegen.__version__, file=sys.stderr)
runpy.run_module("fusegen", run_name="__main__")
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result


def pip(*arguments: str | Path, cwd: Path) -> None:
    run("-m", "pip", "--disable-pip-version-check", *arguments, "--no-deps", "--no-index", cwd=cwd)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's sources, so that no build litters it or reuses its litter."""
    copy = tmp_path_factory.mktemp("checkout") / "fusegen"
    litter = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=litter)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder, checkout, cwd=folder)
    (path,) = folder.glob("fusegen-*.whl")
    return path


@pytest.fixture(scope="module")
def site_directories(
    checkout: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Layout -> the directory that goes on the path for it."""
    from_wheel = tmp_path_factory.mktemp("from_wheel")
    pip("install", "--target", from_wheel, wheel, cwd=from_wheel)

    prefix = tmp_path_factory.mktemp("editable")
    # Without --ignore-installed pip would remove the fusegen of the environment that runs this.
    editable = ("install", "--ignore-installed", "--prefix", prefix, "--no-build-isolation")
    pip(*editable, "--editable", checkout, cwd=prefix)
    (pth,) = prefix.rglob("*fusegen*.pth")
    return {"checkout": checkout, "editable": pth.parent, "wheel": from_wheel}


def dump(site_directory: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    libraries = sysconfig.get_path("purelib")
    return run("-S", "-c", AS_MODULE, site_directory, libraries, "fusegen", "dump", "relu", cwd=cwd)


def test_the_packages_templates_are_a_symlink_to_the_top_level() -> None:
    link = ROOT / "fusegen" / "templates"
    assert link.is_symlink()
    assert link.readlink() == Path("../templates")


def test_a_wheel_carries_every_template_as_a_real_file(wheel: Path) -> None:
    assert TEMPLATE_NAMES
    with zipfile.ZipFile(wheel) as archive:
        packed = {entry.filename: entry for entry in archive.infolist()}
        in_wheel = sorted(name for name in packed if name.startswith("fusegen/templates/"))
        assert in_wheel == [f"fusegen/{name}" for name in TEMPLATE_NAMES]
        for name in TEMPLATE_NAMES:
            entry = packed[f"fusegen/{name}"]
            assert stat.S_ISREG(entry.external_attr >> 16)
            assert archive.read(entry) == (ROOT / name).read_bytes()


def test_a_wheel_carries_the_package_its_type_marker_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "fusegen/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fusegen"}


def test_the_wheel_and_the_package_tell_the_same_version(wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    assert f'__version__ = "{version}"' in (ROOT / "fusegen" / "__init__.py").read_text("utf-8")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dump_finds_its_templates(
    layout: str, site_directories: dict[str, Path], checkout: Path, tmp_path: Path
) -> None:
    result = dump(site_directories[layout], cwd=tmp_path)
    home = site_directories["wheel"] if layout == "wheel" else checkout
    assert result.stderr.startswith(f"{home / 'fusegen' / '__init__.py'} ")
    assert "relu" in result.stdout


def test_every_layout_dumps_the_same_text(
    site_directories: dict[str, Path], tmp_path: Path
) -> None:
    texts = {dump(site_directories[layout], cwd=tmp_path).stdout for layout in LAYOUTS}
    assert len(texts) == 1
