//! The licences of the program and of what it contains.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::build::Flavour;
use super::closure;
use super::piece::sorted;

/// Beginnings of the names of files with licences, in capitals.
const NAMES: &[&str] = &["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// The licences of the program: both texts, or Debian's machine-readable file.
pub fn own(mit: &str, apache: &str, debian: bool) -> String {
    if !debian {
        return format!(
            "blockhaul is under the MIT licence or the Apache License 2.0, at your option.\n\n\
             {mit}\n\n{apache}"
        );
    }
    let holder = mit.lines().find_map(|line| line.strip_prefix("Copyright (c) "));
    let body = mit.lines().skip_while(|line| !line.starts_with("Permission"));
    let mut text = format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
         Upstream-Name: blockhaul\n\
         Comment: The licences of crates that are part of the program are in\n \
         /usr/share/doc/blockhaul/third-party.gz.\n\n\
         Files: *\nCopyright: {}\nLicense: Expat or Apache-2.0\n\nLicense: Expat\n",
        holder.unwrap_or("The blockhaul developers")
    );
    for line in body {
        let _ = writeln!(text, " {}", if line.is_empty() { "." } else { line });
    }
    text + "\nLicense: Apache-2.0\n On Debian systems, the text of the Apache License 2.0 is in\n \
            /usr/share/common-licenses/Apache-2.0.\n"
}

/// The crates of others in the program with their licences, each text once.
pub fn third_party(flavour: Flavour) -> Result<String, String> {
    let others: Vec<_> = closure::crates(flavour)?.into_iter().filter(|found| !found.own).collect();
    let mut text = String::from("Crates that are part of this program, and their licences.\n\n");
    let mut users: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for found in &others {
        let name = format!("{} {}", found.name, found.version);
        let _ = writeln!(text, "{name}: {}", found.licence);
        for file in texts(&found.dir)? {
            let bytes = fs::read(&file)
                .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
            let licence = String::from_utf8_lossy(&bytes).replace("\r\n", "\n").trim().to_owned();
            users.entry(licence).or_default().push(name.clone());
        }
    }
    for (licence, mut names) in users {
        names.dedup();
        let _ = write!(text, "\n{}\n{}:\n\n{licence}\n", "-".repeat(80), names.join(", "));
    }
    Ok(text)
}

/// The files with licences of a crate. That of OpenSSL is in a directory of its own.
fn texts(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let mut found = sorted(dir)?;
    let inner = dir.join("openssl");
    if inner.is_dir() {
        found.extend(sorted(&inner)?);
    }
    found.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        path.is_file() && NAMES.iter().any(|known| name.starts_with(known))
    });
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debian_s_copyright_has_no_empty_line_in_a_field() {
        let mit = "MIT License\n\nCopyright (c) 2026 Somebody\n\nPermission is granted.\n\nNo warranty.\n";
        let text = own(mit, "apache", true);
        assert!(text.contains("\nCopyright: 2026 Somebody\n"), "{text}");
        assert!(
            text.contains("\nLicense: Expat\n Permission is granted.\n .\n No warranty.\n\n"),
            "{text}"
        );
        assert!(own(mit, "apache", false).ends_with("apache"));
    }
}
