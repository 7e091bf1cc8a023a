//! The places that ARCHITECTURE.md names: each file and folder exists.

use std::fs;
use std::path::{Path, PathBuf};

use crate::TaskResult;

/// Fails if ARCHITECTURE.md names a file or folder that does not exist.
pub fn check(root: &Path) -> TaskResult {
    let path = root.join("ARCHITECTURE.md");
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let homes = homes(root)?;
    let named = text.split('`').skip(1).step_by(2).filter(|word| is_place(word));
    let missing: Vec<_> = named
        .flat_map(expanded)
        .filter(|place| !homes.iter().any(|home| home.join(place).exists()))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!("ARCHITECTURE.md names what does not exist:\n  {}", missing.join("\n  ")))
}

/// Whether a word in backquotes is a path.
fn is_place(word: &str) -> bool {
    let is_path = |c: char| c.is_ascii_alphanumeric() || "_-./{},".contains(c);
    word.contains('/') && word.chars().all(is_path) && !word.starts_with(['.', '/', '-'])
}

/// The folders below which a place may be: the root, and that of each crate's folder.
fn homes(root: &Path) -> Result<Vec<PathBuf>, String> {
    let mut homes = vec![root.to_path_buf(), root.join("crates"), root.join("tools")];
    let rows = fs::read_dir(root.join("crates")).map_err(|error| format!("crates: {error}"))?;
    homes.extend(rows.flatten().map(|row| row.path()));
    Ok(homes)
}

/// `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn expanded(place: &str) -> Vec<String> {
    let Some((before, rest)) = place.split_once('{') else { return vec![place.to_string()] };
    let Some((names, after)) = rest.split_once('}') else { return vec![place.to_string()] };
    names.split(',').flat_map(|name| expanded(&format!("{before}{name}{after}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_words_with_a_slash() {
        assert!(is_place("cli/src/{a,b}.rs") && is_place("bench/scenarios"));
        assert!(!is_place("SEEK_HOLE") && !is_place("a b/c") && !is_place("--x/y"));
        assert_eq!(expanded("a/{b,c}/{d,e}"), ["a/b/d", "a/b/e", "a/c/d", "a/c/e"]);
    }

    #[test]
    fn every_place_exists() {
        check(&crate::run::workspace()).unwrap();
    }
}
