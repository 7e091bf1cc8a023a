//! What checks the types of the Python package: mypy, in a virtual environment below the target directory.

use std::fs;
use std::process::Command;

use crate::suite::at;
use crate::{Outcome, run};

/// The oldest mypy that knows what the package uses.
const MYPY: &str = "mypy>=1.11";

/// Installs mypy into `target/python-tools`, from PyPI, unless it is there or on this machine.
pub fn ensure() -> Outcome {
    let folder = run::target().join("python-tools");
    let works = |python: &mut Command| run::quiet(python.args(["-m", "mypy", "--version"])).is_ok();
    if works(&mut Command::new(folder.join("bin/python3"))) || works(&mut Command::new("python3")) {
        return Ok(());
    }
    println!("installing mypy into {}", folder.display());
    let made = run::quiet(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))
        .and_then(|_| {
            let mut pip = Command::new(folder.join("bin/python3"));
            run::quiet(pip.args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                MYPY,
            ]))
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
