//! SHA256SUMS over the files of a release.

use std::path::Path;
use std::process::Command;

use super::files;
use super::piece::{DistRun, write};
use crate::{TaskResult, run};

/// Writes the sums of every package of this version, also of those made earlier.
pub fn write_all(dist: &DistRun) -> TaskResult {
    let names: Vec<_> = files::below(&dist.out)?
        .into_iter()
        .filter(|name| of_version(name, dist.version))
        .collect();
    if names.is_empty() {
        return Err("no package was made".into());
    }
    let text = run::quiet(Command::new("sha256sum").current_dir(&dist.out).arg("--").args(&names))?;
    write(&dist.out.join("SHA256SUMS"), text)
}

/// The SHA-256 of a file, in hexadecimal digits.
pub fn of(file: &Path) -> Result<String, String> {
    let text = run::quiet(Command::new("sha256sum").arg("--").arg(file))?;
    let sum = text.split_whitespace().next().unwrap_or_default().trim_start_matches('\\');
    Ok(sum.to_owned())
}

fn of_version(name: &Path, version: &str) -> bool {
    let name = name.to_string_lossy();
    ["blockhaul-", "blockhaul_"].iter().any(|start| {
        let rest = name.strip_prefix(start).and_then(|rest| rest.strip_prefix(version));
        rest.is_some_and(|rest| rest.starts_with(['-', '_', '.']))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_other_versions_are_left_out() {
        let is = |name: &str| of_version(Path::new(name), "1.2.0");
        assert!(is("blockhaul_1.2.0_amd64.deb") && is("blockhaul-1.2.0.cdx.json"));
        assert!(!is("blockhaul_1.2.01_amd64.deb") && !is("blockhaul-1.1.0-1.x86_64.rpm"));
        assert!(!is("SHA256SUMS"));
    }
}
