//! The crates that are in the program, from `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use super::build::Flavour;
use crate::run;

/// Crates that are needed at build time, but whose code gets into the program.
const COMPILED_IN: &[&str] = &["openssl-src"];

/// A crate that is in the program.
#[derive(Clone, Debug)]
pub struct Crate {
    pub name: String,
    pub version: String,
    /// An SPDX expression.
    pub licence: String,
    /// Whether it comes from this workspace.
    pub own: bool,
    /// Its directory with the sources.
    pub dir: PathBuf,
    /// SHA-256 of its archive in the registry, by `Cargo.lock`.
    pub checksum: Option<String>,
    /// Names and versions of the crates that it uses.
    pub uses: Vec<(String, String)>,
}

/// The package of the program.
pub const PROGRAM: &str = "blockhaul-cli";

/// The crates of the program, sorted by name and version.
pub fn crates(flavour: Flavour) -> Result<Vec<Crate>, String> {
    let mut cargo = run::cargo("metadata");
    cargo.args(["--format-version", "1", "--locked", "--filter-platform"]);
    cargo.arg(format!("{}-unknown-linux-gnu", std::env::consts::ARCH));
    cargo.args(["--manifest-path", "crates/programs/cli/Cargo.toml"]).args(flavour.features());
    let text = run::quiet(&mut cargo)?;
    let data = serde_json::from_str(&text).map_err(|error| format!("cargo metadata: {error}"))?;
    let lock = run::workspace().join("Cargo.lock");
    let lock = fs::read_to_string(&lock)
        .map_err(|error| format!("cannot read {}: {error}", lock.display()))?;
    reached(&data, &checksums(&lock)).ok_or("cargo metadata printed something unexpected".into())
}

/// The crates that the package of the program reaches.
fn reached(data: &Value, checksums: &BTreeMap<(String, String), String>) -> Option<Vec<Crate>> {
    let by_id: BTreeMap<&str, &Value> = data["packages"]
        .as_array()?
        .iter()
        .filter_map(|package| Some((package["id"].as_str()?, package)))
        .collect();
    let nodes: BTreeMap<&str, &Value> = data["resolve"]["nodes"]
        .as_array()?
        .iter()
        .filter_map(|node| Some((node["id"].as_str()?, node)))
        .collect();
    let root = by_id.iter().find(|(_, package)| package["name"] == PROGRAM)?.0;
    let mut seen = BTreeSet::from([*root]);
    let mut next = vec![*root];
    let mut found = Vec::new();
    while let Some(id) = next.pop() {
        let inner = linked(nodes.get(id)?, &by_id);
        found.push(described(by_id.get(id)?, &inner, &by_id, checksums)?);
        next.extend(inner.into_iter().filter(|id| seen.insert(id)));
    }
    found.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    Some(found)
}

/// Ids of the crates that a crate links.
fn linked<'a>(node: &'a Value, by_id: &BTreeMap<&str, &Value>) -> Vec<&'a str> {
    let edges = node["deps"].as_array().map(Vec::as_slice).unwrap_or_default();
    edges
        .iter()
        .filter_map(|edge| {
            let id = edge["pkg"].as_str()?;
            let kinds = edge["dep_kinds"].as_array()?;
            let name = by_id.get(id)?["name"].as_str()?;
            let normal = kinds.iter().any(|kind| kind["kind"].is_null());
            (normal || COMPILED_IN.contains(&name)).then_some(id)
        })
        .collect()
}

fn described(
    package: &Value,
    uses: &[&str],
    by_id: &BTreeMap<&str, &Value>,
    checksums: &BTreeMap<(String, String), String>,
) -> Option<Crate> {
    let key = |package: &Value| {
        let text = |field: &str| package[field].as_str().map(str::to_owned);
        Some((text("name")?, text("version")?))
    };
    let (name, version) = key(package)?;
    let manifest = PathBuf::from(package["manifest_path"].as_str()?);
    let mut uses: Vec<_> = uses.iter().filter_map(|id| key(by_id.get(id)?)).collect();
    uses.sort();
    Some(Crate {
        checksum: checksums.get(&(name.clone(), version.clone())).cloned(),
        // "MIT/Apache-2.0" is the old form of the same expression.
        licence: package["license"].as_str().unwrap_or("NOASSERTION").replace('/', " OR "),
        own: package["source"].is_null(),
        dir: manifest.parent()?.to_path_buf(),
        name,
        version,
        uses,
    })
}

/// Checksums of `Cargo.lock`, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let mut found = BTreeMap::new();
    for block in lock.split("[[package]]") {
        let field = |name: &str| {
            let line =
                block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))?;
            Some(line.trim_matches('"').to_owned())
        };
        if let (Some(name), Some(version), Some(sum)) =
            (field("name"), field("version"), field("checksum"))
        {
            found.insert((name, version), sum);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_read_from_the_lock_file() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\n\n[[package]]\n\
                    name = \"b\"\nversion = \"2.0.0\"\nchecksum = \"ff00\"\ndependencies = [\n \"a\",\n]\n";
        let found = checksums(lock);
        assert_eq!(found.len(), 1);
        assert_eq!(found[&("b".to_owned(), "2.0.0".to_owned())], "ff00");
    }

    #[test]
    fn the_program_consists_of_what_it_links() {
        let names = |flavour| -> Vec<String> {
            crates(flavour).unwrap().into_iter().map(|found| found.name).collect()
        };
        let shared = names(Flavour::Shared);
        let fixed = names(Flavour::Static);
        let has = |list: &[String], name: &str| list.iter().any(|found| found == name);
        for list in [&shared, &fixed] {
            assert!(has(list, "blockhaul-wire") && has(list, "openssl-sys"), "{list:?}");
            assert!(!has(list, "proptest") && !has(list, "pkg-config"), "{list:?}");
        }
        assert!(has(&shared, "blockhaul-cabi") && !has(&fixed, "blockhaul-cabi"));
        assert!(has(&fixed, "openssl-src") && !has(&shared, "openssl-src"));
    }
}
