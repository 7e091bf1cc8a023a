//! Dependencies between rows: a crate uses crates of rows below its own, and only programs parse command
//! lines. ARCHITECTURE.md has the table of rows.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::TaskResult;

/// The rows, the lowest first: folders under `crates`, with crates in them, or one crate each.
const ROWS: [&str; 8] =
    ["ground", "core", "devices", "uses", "compat", "registry", "blockhaul", "programs"];

/// Crates of one row that use each other, and a tool that uses all devices: who uses what.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("compat/qemu-img", "compat/command-lines"),
    ("core/catalog", "core/block"),
    ("core/change-lists", "core/block"),
    ("devices/cabi", "devices/foreign"),
    ("devices/formats", "devices/layers"),
    ("devices/isolated", "devices/client"),
    ("devices/kubevirt", "devices/client"),
    ("devices/remote", "devices/layers"),
    ("devices/restic", "devices/remote"),
    ("devices/snapshot", "devices/layers"),
    ("devices/vddk", "devices/foreign"),
    ("devices/vddk", "devices/isolated"),
    ("uses/backups", "uses/engine"),
    ("uses/backups", "uses/transfer"),
    ("uses/follow", "uses/engine"),
    ("uses/follow", "uses/transfer"),
    ("uses/inspect", "uses/transfer"),
    ("uses/metrics", "uses/engine"),
    ("uses/metrics", "uses/server"),
    ("uses/jobs", "uses/control"),
    ("uses/jobs", "uses/engine"),
    ("uses/jobs", "uses/transfer"),
    ("uses/server-config", "uses/jobs"),
    ("uses/server-config", "uses/server"),
    ("uses/transfer", "uses/engine"),
    ("programs/cli", "programs/measure"),
    ("tools/bench", "programs/measure"),
];

/// What only programs use.
const OF_PROGRAMS: &str = "clap";

/// Crates with their folders below `crates`, or below the root for tools, and the names of the crates that each depends on.
type Crates = BTreeMap<String, (String, Vec<String>)>;

/// Fails if a crate depends on one of a higher row.
pub fn check(root: &Path) -> TaskResult {
    let found = faults(&read(root)?);
    if found.is_empty() {
        return Ok(());
    }
    Err(format!("dependencies against the rows of ARCHITECTURE.md:\n  {}", found.join("\n  ")))
}

/// A line for each dependency that is not allowed.
fn faults(crates: &Crates) -> Vec<String> {
    let mut found = Vec::new();
    for (folder, dependencies) in crates.values() {
        for name in dependencies {
            let is_allowed = match crates.get(name) {
                Some((used, _)) => {
                    is_above(folder, used) || EXCEPTIONS.contains(&(folder.as_str(), used.as_str()))
                }
                None => {
                    name.split('_').next() != Some(OF_PROGRAMS)
                        || ["programs/", "tools/"].iter().any(|row| folder.starts_with(row))
                }
            };
            if !is_allowed {
                let below = if folder.starts_with("tools/") { "" } else { "crates/" };
                found.push(format!("{below}{folder} uses {name}"));
            }
        }
    }
    found
}

/// Whether a crate is in a higher row than the one that it uses. Tools are above all but programs, and no crate of
/// a row uses them.
fn is_above(folder: &str, used: &str) -> bool {
    let row = |folder: &str| ROWS.iter().position(|row| folder.split('/').next() == Some(row));
    match (row(folder), row(used)) {
        (Some(own), Some(other)) => own > other,
        (None, Some(other)) => ROWS[other] != "programs",
        (None, None) => true,
        (Some(_), None) => false,
    }
}

fn read(root: &Path) -> Result<Crates, String> {
    let mut crates = Crates::new();
    for row in folders(&root.join("crates"))? {
        let path = root.join("crates").join(&row);
        if path.join("Cargo.toml").is_file() {
            add(&mut crates, &path, &row)?;
            continue;
        }
        for one in folders(&path)? {
            add(&mut crates, &path.join(&one), &format!("{row}/{one}"))?;
        }
    }
    for tool in folders(&root.join("tools"))? {
        add(&mut crates, &root.join("tools").join(&tool), &format!("tools/{tool}"))?;
    }
    Ok(crates)
}

fn folders(path: &Path) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let is_folder = |entry: &fs::DirEntry| entry.path().is_dir();
    let names = entries.flatten().filter(is_folder);
    Ok(names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

/// Adds the crate in this folder, if there is one.
fn add(crates: &mut Crates, path: &Path, folder: &str) -> Result<(), String> {
    let file = path.join("Cargo.toml");
    if !file.is_file() {
        return Ok(());
    }
    let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    let (name, dependencies) = understand(&text);
    crates.insert(name, (folder.to_string(), dependencies));
    Ok(())
}

/// The name of a package, and its dependencies that are not for tests only.
fn understand(text: &str) -> (String, Vec<String>) {
    let mut section = "";
    let mut name = String::new();
    let mut dependencies = Vec::new();
    for line in text.lines() {
        if line.starts_with('[') {
            section = line;
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        let key = key.trim().split('.').next().unwrap_or_default();
        match section {
            "[package]" if key == "name" => name = value.trim().trim_matches('"').to_string(),
            "[dependencies]" if !key.starts_with('#') => dependencies.push(key.to_string()),
            _ => {}
        }
    }
    (name, dependencies)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_rows_are_refused() {
        let one = |name: &str, folder: &str, used: &[&str]| {
            let used = used.iter().map(ToString::to_string).collect();
            (name.to_string(), (folder.to_string(), used))
        };
        let crates = Crates::from([
            one("io", "ground/io", &["rustix"]),
            one("engine", "uses/engine", &["io"]),
            one("transfer", "uses/transfer", &["engine", "io", "clap"]),
            one("layers", "devices/layers", &["engine"]),
            one("cli", "programs/cli", &["transfer", "clap", "clap_mangen"]),
            one("testkit", "tools/testkit", &["io", "cli"]),
            one("server", "uses/server", &["testkit", "engine"]),
        ]);
        assert_eq!(
            faults(&crates),
            [
                "crates/devices/layers uses engine",
                "crates/uses/server uses testkit",
                "crates/uses/server uses engine",
                "tools/testkit uses cli",
                "crates/uses/transfer uses clap",
            ]
        );
    }

    #[test]
    fn dependencies_are_read() {
        let text = "[package]\nname = \"a\"\n[dependencies]\n# none = 1\nb.workspace = true\n\
                    c = { path = \"d\" }\n[dev-dependencies]\ne = \"1\"\n";
        assert_eq!(understand(text), ("a".into(), vec!["b".into(), "c".into()]));
    }

    #[test]
    fn the_workspace_keeps_its_rows() {
        check(&crate::run::workspace()).unwrap();
    }
}
