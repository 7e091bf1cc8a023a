//! The wheel of the Python package: made from this build, installed in a clean virtual environment, tested
//! there. Its tests are Python's own unittest, in `tests/python`.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use blockhaul_testkit::tools::{self, ScratchDir, SkipReason, skip_or_fail, text};
use blockhaul_tests::{fresh_module, program};

const LIMIT: Duration = Duration::from_secs(240);

/// An environment with the package.
struct Installed {
    folder: PathBuf,
    python: PathBuf,
}

/// The environment for all tests here; `None`: there is no Python 3.11, and the tests are skipped.
fn installed() -> Option<&'static Installed> {
    static INSTALLED: OnceLock<Option<Installed>> = OnceLock::new();
    INSTALLED.get_or_init(install).as_ref()
}

fn install() -> Option<Installed> {
    let is_there = "import sys; sys.exit(sys.version_info < (3, 11))";
    let found = Command::new("python3").args(["-c", is_there]).status();
    if !found.is_ok_and(|status| status.success()) {
        skip_or_fail(&SkipReason::new("python3 is missing, or older than 3.11"));
        return None;
    }
    // Nothing is dropped that is static: a folder that the next run replaces.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python-package");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).unwrap();
    }
    std::fs::create_dir_all(&folder).unwrap();
    let environment = folder.join("environment");
    // Without pip: Debian's python3 has none for environments unless python3-venv is installed.
    run(Command::new("python3").args(["-m", "venv", "--without-pip"]).arg(&environment));
    let build = workspace().join("crates/programs/python/build/blockhaul_build.py");
    let compiled = fresh_module();
    let make = |words: &[&OsStr]| run(Command::new("python3").arg(&build).args(words));
    let from = compiled.as_os_str();
    let wheels = folder.as_os_str();
    let name = make(&["wheel".as_ref(), wheels, "--from".as_ref(), from]);
    let wheel = folder.join(name.trim());
    make(&["install".as_ref(), wheel.as_os_str(), environment.as_os_str()]);
    Some(Installed { python: environment.join("bin/python3"), folder })
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Runs a command that succeeds; returns its standard output.
fn run(command: &mut Command) -> String {
    let output = tools::output(command, LIMIT).unwrap();
    let out = text(&output.stdout);
    let error = text(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{out}{error}", output.status);
    out
}

/// Runs the tests of one file.
fn passes(file: &str) {
    let Some(installed) = installed() else { return };
    let folder = workspace().join("tests/python");
    let mut command = Command::new(&installed.python);
    command.current_dir(folder).args(["-B", "-m", "unittest", file]);
    run(&mut command);
}

#[test]
fn devices_and_copies_work_in_python() {
    passes("test_device");
}

#[test]
fn devices_work_in_asyncio() {
    passes("test_aio");
}

#[test]
fn the_interface_of_libnbd_works() {
    passes("test_nbd");
}

#[test]
fn the_metadata_needs_no_compiler() {
    let Some(installed) = installed() else { return };
    let folder = ScratchDir::new().unwrap();
    let hook = "import blockhaul_build, sys; print(blockhaul_build.prepare_metadata_for_build_wheel(sys.argv[1]))";
    let mut command = Command::new(&installed.python);
    command
        .env("CARGO", "/nonexistent/cargo")
        .current_dir(workspace().join("crates/programs/python/build"));
    let name = run(command.args(["-B", "-c", hook]).arg(folder.path()));
    let written = folder.path().join(name.trim());
    let packages = installed.folder.join("environment/lib");
    let python = std::fs::read_dir(packages).unwrap().next().unwrap().unwrap().path();
    for file in ["METADATA", "WHEEL"] {
        let of_wheel = python.join("site-packages").join(name.trim()).join(file);
        let [one, other] = [written.join(file), of_wheel].map(|path| std::fs::read(path).unwrap());
        assert_eq!(one, other, "{file} is that of the wheel");
    }
}

#[test]
fn the_program_is_beside_the_package() {
    let Some(installed) = installed() else { return };
    let beside = installed.python.with_file_name("blockhaul");
    let ours = run(Command::new(program()).arg("--version"));
    assert_eq!(run(Command::new(beside).arg("--version")), ours);
    let version = run(Command::new(&installed.python)
        .args(["-c", "import blockhaul; print(blockhaul.__version__)"]));
    assert!(ours.contains(version.trim()), "{version} in {ours}");
}

/// `pip install .` in an empty environment. It packs what this build has compiled; where long tests run, it
/// compiles all itself.
#[test]
fn pip_installs_a_checkout() {
    if installed().is_none() {
        return;
    }
    let folder = ScratchDir::on_disk().unwrap();
    let environment = folder.file("environment");
    let made = Command::new("python3").args(["-m", "venv"]).arg(&environment).output().unwrap();
    if !made.status.success() {
        tools::skip("python3 makes no environments with pip: python3-venv is not installed");
        return;
    }
    let python = environment.join("bin/python3");
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-cache-dir",
        "--disable-pip-version-check",
    ]);
    pip.arg(workspace()).env("TMPDIR", folder.path());
    if tools::long() {
        let output = tools::output(&mut pip, Duration::from_secs(3600)).unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    } else {
        run(pip.env("BLOCKHAUL_WHEEL_COMPILED", fresh_module()));
    }
    let ask = "import blockhaul; print(blockhaul.program()); blockhaul.copy('pattern:1m', 'null:')";
    let program = run(Command::new(&python).args(["-c", ask]));
    let beside = python.with_file_name("blockhaul");
    assert_eq!(Path::new(program.trim()), beside);
    assert!(run(Command::new(beside).arg("--version")).starts_with("blockhaul "));
}

#[test]
fn the_package_is_typed() {
    let Some(installed) = installed() else { return };
    let Some(python) = tools::python_with("mypy") else { return };
    let cache = installed.folder.join("mypy");
    let package = workspace().join("crates/programs/python/blockhaul");
    let mut check = Command::new(python);
    check.args(["-m", "mypy", "--strict", "--cache-dir"]).arg(&cache);
    run(check.arg("--python-executable").arg(&installed.python).arg(package));
}

#[test]
fn the_stubs_are_those_of_the_module() {
    let Some(installed) = installed() else { return };
    let Some(python) = tools::python_with("mypy") else { return };
    // It imports the package, too.
    let ask = "import os, blockhaul; print(os.path.dirname(os.path.dirname(blockhaul.__file__)))";
    let packages = run(Command::new(&installed.python).args(["-c", ask]));
    let folder = ScratchDir::new().unwrap();
    let mut check = Command::new(python);
    check.current_dir(folder.path()).env("PYTHONPATH", packages.trim());
    run(check.args(["-m", "mypy.stubtest", "blockhaul"]));
}

#[test]
fn the_examples_run() {
    let Some(installed) = installed() else { return };
    let examples = workspace().join("examples/python");
    let folder = ScratchDir::new().unwrap();
    let target = folder.file("copy.raw");
    let example = |name: &str, words: &[&OsStr]| {
        run(Command::new(&installed.python).arg(examples.join(name)).args(words))
    };
    example("progress_bar.py", &["pattern:8m".as_ref(), target.as_os_str()]);
    assert_eq!(target.metadata().unwrap().len(), 8 << 20);
    let socket = folder.socket("s");
    let served = target.display().to_string();
    let server = tools::PeerServer::blockhaul(program(), &socket, &[&served]).unwrap();
    let uri = server.uri("");
    let digest = example("asyncio_reader.py", &[uri.as_ref()]);
    let again = folder.file("again.raw");
    example("incremental_backup.py", &[uri.as_ref(), again.as_os_str()]);
    let expected =
        run(Command::new(program()).args(["checksum", "--digest", "sha256"]).arg(&again));
    assert_eq!(digest[..64], expected[..64]);
    // base:allocation marks holes; the file has none.
    let bitmap = ["--bitmap", "base:allocation"].map(OsStr::new);
    let said =
        example("incremental_backup.py", &[uri.as_ref(), again.as_os_str(), bitmap[0], bitmap[1]]);
    assert_eq!(said, "0 bytes have changed\n");
    server.stop().unwrap();
}
